"""A program saved, loaded and run gives the same bits and has the same description."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from edgeopt.capture import serialise
from edgeopt.errors import StageError
from tests.capture.support import captured, run
from tests.capture.test_files import onnx_model, read

NET = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    def forward(self, image, bias):
        z = self.net(image).mean((2, 3))
        return {'z': z + bias, 'a': (z, None)}
"""
INPUTS = {"image": {"shape": ["N", 3, "H", 8]}, "bias": {"shape": [4], "values": [-1.0, 1.0]}}
AXES = {"N": {"min": 1, "opt": 1, "max": 8}, "H": {"min": 4, "opt": 8, "max": 16}}
LOOP = """
class Model(nn.Module):
    def forward(self, x):
        for _ in range(int(x.sum())):
            x = x * 0.5
        return x
"""


@pytest.fixture(params=["exported", "script", "onnx", "integer"])
def program(request, tmp_path):
    if request.param == "script":
        return captured(
            tmp_path, LOOP, {"x": {"shape": ["N"], "values": [0.0, 2.0]}}, {"N": {"min": 1, "opt": 2, "max": 3}}
        )
    if request.param == "onnx":
        onnx.save(onnx_model(), tmp_path / "m.onnx")
        return read(tmp_path, "m.onnx")
    made = captured(tmp_path, NET, INPUTS, AXES)
    return with_fake_quantizers(made) if request.param == "integer" else made


def with_fake_quantizers(program):
    """The program with a quantize and a dequantize behind its first input."""
    import torch
    import torch.ao.quantization.fx._decomposed  # noqa: F401  registers the operators

    module = torch.fx.GraphModule(program.module, program.module.graph)
    place = next(n for n in module.graph.nodes if n.op == "placeholder")
    ops = torch.ops.quantized_decomposed
    with module.graph.inserting_after(place):
        q = module.graph.call_function(ops.quantize_per_tensor.default, (place, 0.01, 3, -128, 127, torch.int8))
    with module.graph.inserting_after(q):
        dq = module.graph.call_function(ops.dequantize_per_tensor.default, (q, 0.01, 3, -128, 127, torch.int8))
    place.replace_all_uses_with(dq, delete_user_cb=lambda user: user is not q)
    module.recompile()
    return dataclasses.replace(program, module=module, integer=True)


def test_round_trip(program, tmp_path):
    serialise.save(program, tmp_path / "saved")
    again = serialise.load(tmp_path / "saved")
    assert type(again) is type(program)
    for key in ("signature", "stages", "notes", "integer", "how"):
        assert getattr(again, key, None) == getattr(program, key, None)
    assert list(again.signature.output_structure.get("items", {})) == list(
        program.signature.output_structure.get("items", {})
    )
    for call, want in zip(again.reference, program.reference, strict=True):
        assert list(call.inputs) == list(want.inputs)
        for name, array in {**want.inputs, **want.outputs}.items():
            np.testing.assert_array_equal({**call.inputs, **call.outputs}[name], array)
        if hasattr(program, "module"):
            before, after = run(program, **want.inputs), run(again, **want.inputs)
            assert all(np.array_equal(before[k], after[k]) for k in before)
        else:
            assert again.model == program.model


def test_a_damaged_cache_says_what_to_do(program, tmp_path):
    serialise.save(program, tmp_path / "saved")
    for file in (tmp_path / "saved").iterdir():
        if file.name.startswith("model"):
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(StageError) as error:
        serialise.load(tmp_path / "saved")
    assert error.value.todo == "build with --no-cache"
