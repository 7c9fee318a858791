"""Files of models whose outputs are odd, at every opset: names, dtypes, axes and values, integers exactly (O05)."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeopt.backends import onnx_export
from edgeopt.program import graph
from tests.capture.support import captured, eager

INPUTS = {"x": {"shape": ["n", 3, "t"]}, "k": {"shape": []}}
AXES = {"n": {"min": 1, "opt": 2, "max": 5}, "t": {"min": 4, "opt": 8, "max": 40}}
ODD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.register_buffer("stored", torch.arange(5))

    def forward(self, x, k):
        y = self.conv(x) * k
        return {
            "x": y, "same input": x, "again": x, "alias": y, "conv1d": y + 1, "0": y * 2, "": y * 3,
            "stored": self.stored, "stored again": self.stored, "scalar": y.mean(), "factor": k,
            "bool": y > 0, "any": (y > 0).any(), "uint8": (y > 0).to(torch.uint8),
            "int64": y.argmax(1), "int32": y.argmax(1).to(torch.int32), "topk": y.topk(2, 1),
            "nested": [{"a": y.transpose(1, 2)}, (y.reshape(-1), None)], "empty": y[:, :0],
            "half": y.half(), "double": y.double(),
        }
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    return captured(folder, ODD, INPUTS, AXES), folder


def dims(value: onnx.ValueInfoProto) -> tuple:
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim)


@pytest.mark.parametrize("opset, ir", [(13, 7), (17, 8), (20, 9)])
def test_names_dtypes_axes_and_values_are_the_models_own(odd, opset, ir, tmp_path):
    program, folder = odd
    file = onnx_export.write(program, tmp_path, opset_max=opset)
    assert (file.opset, file.ir_version) == (opset, ir)
    model = onnx.load(tmp_path / file.name)
    for values, specs in (
        (model.graph.input, program.signature.inputs),
        (model.graph.output, program.signature.outputs),
    ):
        found = {v.name: (helper_dtype(v), dims(v)) for v in values}
        assert found == {s.name: (s.dtype, s.shape) for s in specs}
    session = onnxruntime.InferenceSession(str(tmp_path / file.name), providers=["CPUExecutionProvider"])
    names = list(program.signature.output_names)
    for seed, which in enumerate(("min", "opt", "max")):
        given = graph.synthetic(program.signature, graph.sizes(program.signature, which), seed)
        wanted = eager(folder, given)
        got = session.run(names, given)
        assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in wanted]
        for name, a, b in zip(names, got, wanted, strict=True):
            if a.dtype.kind in "iub":
                assert np.array_equal(a, b), name
            else:
                np.testing.assert_allclose(a, b, rtol=1e-2 if a.dtype == np.float16 else 1e-4, atol=1e-4)


def helper_dtype(value: onnx.ValueInfoProto) -> str:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)).name
