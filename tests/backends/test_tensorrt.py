"""Recipes for engines, by what the target's TensorRT takes; and the file that two backends share."""

from __future__ import annotations

import onnx
import pytest
import torch

from edgeopt.backends import onnxruntime, tensorrt
from edgeopt.backends.table import BACKENDS
from edgeopt.quant import convert
from edgeopt.spec.profile import load_profile
from tests.quant import programs as quantized
from tests.quant.models import Net


@pytest.fixture(scope="module")
def lowered(case, profile, tmp_path_factory):
    """lowered(PROGRAM, PROFILE): what TensorRT's backend gives, and the folder."""
    known = {}

    def lower(program, target):
        if (program, target) not in known:
            out = tmp_path_factory.mktemp(f"{program}-{target}")
            known[program, target] = tensorrt.lower(case(program).program, profile(target), out), out
        return known[program, target]

    return lower


def test_xavier_gets_opset_17_and_weak_flags(lowered):
    found, out = lowered("residual", "xavier")
    assert found.files == ("float.onnx",) and found.refused == ()
    assert onnx.load(out / "float.onnx").opset_import[0].version == 17
    assert [(c.name, c.precision, c.opset) for c in found.candidates] == [
        ("tensorrt-fp32", "fp32", 17),
        ("tensorrt-fp16", "fp16", 17),
    ]
    assert [(r.candidate, r.typing, r.flags) for r in found.recipes] == [
        ("tensorrt-fp32", "weak", ()),
        ("tensorrt-fp16", "weak", ("fp16",)),
    ]
    assert found.recipes[0].shapes == {"image": {"min": (1, 3, 16, 16), "opt": (1, 3, 16, 16), "max": (8, 3, 16, 16)}}


def test_int8_takes_fp16_beside_it(lowered):
    found, _ = lowered("integer", "xavier")
    (candidate,), (recipe,) = found.candidates, found.recipes
    assert (candidate.name, candidate.file, recipe.flags) == ("tensorrt-int8", "int8.onnx", ("fp16", "int8"))


def test_every_axis_has_its_range(case, profile):
    signature = case("transformer").program.signature
    recipe = tensorrt.recipe("tensorrt-fp32", "fp32", signature, profile("orin-agx"))
    assert recipe.shapes == {"ids": {"min": (1, 2), "opt": (1, 6), "max": (8, 16)}}


def test_a_strongly_typed_tensorrt_gets_no_flags_and_no_fp16_of_an_fp32_file(lowered):
    found, _ = lowered("residual", "desktop-cuda")
    assert [(r.candidate, r.typing, r.flags) for r in found.recipes] == [("tensorrt-fp32", "strong", ())]
    assert found.refused == ()  # its fp16 is a program of its own, in test_half_files


def test_a_gpu_without_int8_refuses_it_with_the_reason(case, profile, tmp_path):
    program = case("integer").program
    assert tensorrt.refusals(program, profile("nano"))
    (refused,) = tensorrt.lower(program, profile("nano"), tmp_path).refused
    assert refused.candidate == "tensorrt-int8" and "int8" in refused.reason
    assert list(tmp_path.iterdir()) == []


def test_a_target_without_tensorrt_refuses(case, profile):
    assert tensorrt.refusals(case("residual").program, profile("x86-cpu")) == ("the target has no TensorRT",)


def test_onnxruntime_and_tensorrt_share_one_file(case, profile, lowered):
    found, out = lowered("residual", "desktop-cuda")
    before = (out / "float.onnx").stat()
    other = onnxruntime.lower(case("residual").program, profile("desktop-cuda"), out)
    assert other.files == found.files
    assert (out / "float.onnx").stat().st_mtime_ns == before.st_mtime_ns
    (candidate,) = other.candidates
    assert candidate.name == "onnxruntime-fp32"
    assert candidate.flags["providers"] == ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_the_cpu_profile_gets_both_precisions(case, profile, tmp_path):
    torch.manual_seed(0)
    given = quantized.program(Net(), 3, 16, 16)
    integer, _ = convert.from_batches(given, quantized.quantization(), quantized.batches(3, 16, 16))
    for made, precision in ((case("residual").program, "fp32"), (integer, "int8")):
        (candidate,) = onnxruntime.lower(made, profile("x86-cpu"), tmp_path).candidates
        assert (candidate.name, candidate.precision, candidate.opset) == (f"onnxruntime-{precision}", precision, 20)
        kept_float = {"disabled_optimizers": ["WeightBiasQuantization"]} if precision == "int8" else {}
        assert candidate.flags == {
            "intra_op_threads": None, "graph_optimization": "all", **kept_float, "providers": ["CPUExecutionProvider"],
        }  # fmt: skip


def test_an_integer_file_that_onnxruntime_runs_in_float_is_refused(case, profile, tmp_path):
    """Biases in float: without its optimizer for weights, which is off, onnxruntime fuses none of these layers."""
    found = onnxruntime.lower(case("integer").program, profile("x86-cpu"), tmp_path)
    assert not found.candidates
    assert "no convolution or matrix product of it on integers" in found.refused[0].reason


def test_the_table_names_each_backend_by_its_runtime():
    assert {name: backend.runtime for name, backend in BACKENDS.items()} == {n: n for n in BACKENDS}


class _OfBytes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 2, 3)

    def forward(self, x):
        return self.layer(x.to(torch.float32))


def test_bytes_are_refused_before_tensorrt_8_5():
    program = quantized.program(_OfBytes(), 3, 6, 6, dtype="uint8", values=(0, 255))
    (reason,) = tensorrt.refusals(program, load_profile("nano"))
    assert "takes no uint8, which the input 'x' is" in reason and "dtype: float32" in reason
    assert tensorrt.refusals(program, load_profile("orin-nano")) == ()
