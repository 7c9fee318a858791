"""Files of 16-bit programs: what they are called, what they store, and which target gets which."""

from __future__ import annotations

import dataclasses
import sys
import warnings

import numpy as np
import onnx
import pytest
import torch

from edgeopt.backends import onnxruntime, script_reload, tensorrt, torchscript
from edgeopt.errors import LoweringError
from edgeopt.passes.half import half
from edgeopt.program import graph
from edgeopt.runtime.compare import output_errors
from edgeopt.spec.half_formats import FORMATS
from edgeopt.spec.profile import load_profile

X86 = load_profile("x86-cpu", {"precision.allowed": "[fp32, fp16, bf16]"})
STRONG = load_profile("desktop-cuda")
THOR_STRONG = load_profile("thor", {"precision.mechanism": "strong-typed"})


@pytest.fixture(scope="session")
def halved(case):
    """halved(NAME, PRECISION): the program in the precision."""
    known = {}

    def make(name: str, precision: str):
        if (name, precision) not in known:
            known[name, precision], report = half(case(name).program, precision)
            assert report.refused is None, report.refused
        return known[name, precision]

    return make


@pytest.mark.parametrize("name", ["residual", "transformer", "shapes"])
def test_the_onnx_file_holds_fp16_weights_and_the_models_interface(case, halved, name, tmp_path):
    found = onnxruntime.lower(halved(name, "fp16"), X86, tmp_path)
    (candidate,) = found.candidates
    assert (candidate.name, candidate.precision, candidate.file) == ("onnxruntime-fp16", "fp16", "float16.onnx")
    signature = case(name).program.signature
    model = onnx.load(tmp_path / "float16.onnx")
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    assert kinds == {s.name: getattr(onnx.TensorProto, _KIND[s.dtype]) for s in (*signature.inputs, *signature.outputs)}


_KIND = {"float32": "FLOAT", "int64": "INT64", "bool": "BOOL"}


def test_the_file_has_half_the_size(case, halved, tmp_path):
    onnxruntime.lower(case("residual").program, X86, tmp_path)
    onnxruntime.lower(halved("residual", "fp16"), X86, tmp_path)
    sizes = {name: (tmp_path / f"{name}.onnx").stat().st_size for name in ("float", "float16")}
    assert sizes["float16"] < 0.6 * sizes["float"]


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_torchscript_in_bf16_is_test_loaded_and_answers(case, halved, name, tmp_path):
    program = halved(name, "bf16")
    found = torchscript.lower(program, X86, tmp_path)
    assert found.refused == () and found.files == ("bfloat16.pt",)
    (candidate,) = found.candidates
    assert (candidate.name, candidate.precision, candidate.file) == ("torchscript-bf16", "bf16", "bfloat16.pt")
    with warnings.catch_warnings():  # torch 2.13 calls TorchScript deprecated
        warnings.simplefilter("ignore")
        module = torch.jit.load(tmp_path / "bfloat16.pt")
    float32 = case(name).program
    inputs = float32.reference[0].inputs
    with torch.no_grad():
        answer = module(*graph.to_tensors(float32.signature, inputs))
    error = output_errors([graph.run(float32, inputs)], [graph.to_arrays(float32.signature, answer)])
    assert min(e.sqnr_db for e in error.values()) > FORMATS["bf16"].least_sqnr_db
    again = tmp_path / "again"
    again.mkdir()
    torchscript.lower(program, X86, again)
    assert (again / "bfloat16.pt").read_bytes() == (tmp_path / "bfloat16.pt").read_bytes()


def test_a_file_that_differs_by_more_than_rounding_is_refused(halved, tmp_path, case):
    program = halved("residual", "bf16")
    torchscript.save(halved("residual", "bf16"), tmp_path / "bfloat16.pt")
    changed = graph.copied(program.module)
    with torch.no_grad():
        next(p for n, p in changed.named_parameters() if p.ndim == 4).mul_(1.5)
    other = dataclasses.replace(program, module=changed)
    with pytest.raises(LoweringError, match="SQNR"):
        script_reload.check(other, tmp_path / "bfloat16.pt", python=sys.executable)


def test_a_strongly_typed_tensorrt_takes_the_file_that_onnxruntime_takes(case, halved, tmp_path):
    for profile in (STRONG, THOR_STRONG):
        out = tmp_path / profile.name
        out.mkdir()
        found = tensorrt.lower(halved("residual", "fp16"), profile, out)
        assert [(c.name, c.precision, c.file) for c in found.candidates] == [("tensorrt-fp16", "fp16", "float16.onnx")]
        assert [(r.candidate, r.typing, r.flags) for r in found.recipes] == [("tensorrt-fp16", "strong", ())]
        assert found.refused == ()
    other = onnxruntime.lower(halved("residual", "fp16"), STRONG, tmp_path / "desktop-cuda")
    assert other.files == ("float16.onnx",)


def test_a_weakly_typed_tensorrt_makes_bf16_by_a_flag_where_it_has_one(case, tmp_path):
    allowed = {"precision.allowed": "[fp32, fp16, bf16]"}
    found = tensorrt.lower(case("residual").program, load_profile("orin-nx", allowed), tmp_path)
    assert [(r.candidate, r.typing, r.flags) for r in found.recipes] == [
        ("tensorrt-fp32", "weak", ()), ("tensorrt-fp16", "weak", ("fp16",)), ("tensorrt-bf16", "weak", ("bf16",)),
    ]  # fmt: skip
    assert {c.file for c in found.candidates} == {"float.onnx"}
    found = tensorrt.lower(case("residual").program, load_profile("orin-nx@5.1", allowed), tmp_path)
    assert [(r.candidate, "9.0" in r.reason) for r in found.refused] == [("tensorrt-bf16", True)]


def test_what_a_target_has_no_kernels_for_is_refused_and_leaves_no_file(halved, tmp_path):
    for backend, precision, profile, word in (
        (torchscript, "fp16", X86, "no fp16 kernels"),
        (onnxruntime, "bf16", X86, "no bf16 kernels"),
        (onnxruntime, "bf16", STRONG, "could prove it"),
        (tensorrt, "bf16", STRONG, "from the file alone"),
        (torchscript, "bf16", load_profile("xavier"), "sm_72 has no bf16"),
    ):
        found = backend.lower(halved("residual", precision), profile, tmp_path)
        (refused,) = found.refused
        assert word in refused.reason and found.candidates == () and list(tmp_path.iterdir()) == []


def test_the_bounds_follow_from_the_formats():
    assert {name: form.least_sqnr_db for name, form in FORMATS.items()} == {"fp16": 38, "bf16": 20}
    for name, form in FORMATS.items():
        info = torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16}[name])
        assert (form.largest, form.smallest_normal) == (info.max, info.smallest_normal)
        assert form.unit_roundoff == info.eps / 2
        assert np.isclose(form.smallest, info.smallest_normal * info.eps)
