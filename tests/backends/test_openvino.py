"""OpenVINO: the same files as onnxruntime's, equal to the eager module at other sizes, integers that really run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgeopt.backends import onnxruntime, openvino, openvino_kernels
from edgeopt.errors import LoweringError
from edgeopt.onboard import ov
from edgeopt.program import OnnxGraph
from edgeopt.spec.manifest import TensorSpec
from edgeopt.spec.profile import load_profile, precisions_of


def opened(made, folder, lowered, threads=1):
    """The adaptor's program for the one candidate that was lowered into `folder`."""
    (candidate,) = lowered.candidates
    signature = made.program.signature
    specs = [[spec.model_dump(mode="json") for spec in side] for side in (signature.inputs, signature.outputs)]
    return ov.open_program(str(folder), candidate.model_dump(mode="json"), *specs, [], threads)


SIZES = {
    "residual": [{"batch": 1}, {"batch": 5}, {"batch": 8}],
    "transformer": [{"batch": 1, "time": 2}, {"batch": 3, "time": 11}, {"batch": 8, "time": 16}],
    "resizing": [{"batch": 1, "h": 4}, {"batch": 3, "h": 17}, {"batch": 2, "h": 32}],
}


@pytest.mark.parametrize("name", SIZES)
def test_the_candidate_equals_the_eager_module_at_several_sizes_of_each_axis(name, case, profile, tmp_path):
    made = case(name)
    lowered = openvino.lower(made.program, profile("x86-cpu"), tmp_path)
    program = opened(made, tmp_path, lowered)
    for sizes in (*SIZES[name], SIZES[name][0]):  # the first once more: kernels are cached by shape
        inputs = made.inputs(**sizes)
        found = program.call([inputs[n] for n in made.program.signature.input_names])
        for wanted, got in zip(made.expected(inputs), found, strict=True):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)  # bf16, its own choice with AMX, is off by 1e-2
    program.close()


def test_results_of_a_call_stay_what_they_were_when_the_next_one_is_made(case, profile, tmp_path):
    made = case("residual")
    program = opened(made, tmp_path, openvino.lower(made.program, profile("x86-cpu"), tmp_path))
    image = made.inputs(batch=2)["image"]
    (first,) = program.call([image])
    kept = first.copy()
    program.call([-image])
    np.testing.assert_array_equal(first, kept)


def test_it_names_the_file_that_onnxruntime_names(case, profile, tmp_path):
    made = case("residual")
    theirs = onnxruntime.lower(made.program, profile("x86-cpu"), tmp_path)
    before = (tmp_path / "float.onnx").read_bytes()
    ours = openvino.lower(made.program, profile("x86-cpu"), tmp_path)
    assert ours.files == theirs.files == ("float.onnx",) and (tmp_path / "float.onnx").read_bytes() == before
    (candidate,) = ours.candidates
    assert (candidate.name, candidate.runtime, candidate.file) == ("openvino-fp32", "openvino", "float.onnx")
    assert candidate.flags["inference_precision"] == "f32" and candidate.flags["performance_hint"] == "latency"


def test_an_integer_file_runs_on_integers_and_a_float_file_does_not(case, profile, tmp_path):
    lowered = openvino.lower(case("unsigned").program, profile("x86-cpu"), tmp_path)
    assert [c.name for c in lowered.candidates] == ["openvino-int8"]
    integer = openvino_kernels.kernels(tmp_path / "int8.onnx")
    assert integer.integer["Convolution"] == 3 and "Convolution" not in integer.floats
    openvino.lower(case("residual").program, profile("x86-cpu"), tmp_path)
    floats = openvino_kernels.kernels(tmp_path / "float.onnx")
    assert floats.integer_products == 0 and floats.floats["Convolution"] == 3 and floats.float_products == 4


def test_layers_are_counted_by_the_precision_that_they_compute_in():
    layers = [
        ("Const", "i8"), ("Input", "f32"), ("FakeQuantize", "f32"), ("Convolution", "u8"), ("Convolution", "i8"),
        ("Convolution", "f32"), ("MatMul", "bf16"), ("Pooling", "u8"), ("Reorder", "u8"), ("Output", "f32"),
    ]  # fmt: skip
    found = openvino_kernels.Kernels(**openvino_kernels.counted(layers))
    assert found.integer == {"Convolution": 2, "Pooling": 1} and found.floats == {"Convolution": 1, "MatMul": 1}
    assert found.conversions == {"FakeQuantize": 1, "Reorder": 1}
    assert (found.integer_products, found.float_products) == (2, 2)


def test_a_file_that_cannot_be_compiled_is_refused_and_the_process_lives(tmp_path):
    (tmp_path / "int8.onnx").write_bytes(b"no model")
    with pytest.raises(LoweringError, match="OpenVINO cannot compile the file"):
        openvino_kernels.kernels(tmp_path / "int8.onnx")


@pytest.mark.parametrize("name", ["desktop-cuda", "orin-nx", "nano"])
def test_a_target_with_a_gpu_is_refused(name, case, profile, tmp_path):
    lowered = openvino.lower(case("residual").program, profile(name), tmp_path)
    assert not lowered.candidates and not list(tmp_path.iterdir())
    assert "CPU targets" in lowered.refused[0].reason


def test_int8_is_refused_where_its_kernels_were_not_seen(case, tmp_path):
    (tmp_path / "arm.yaml").write_text("base: arm64-cpu\nbackends: [onnxruntime, openvino]\n")
    arm = load_profile(str(tmp_path / "arm.yaml"))
    assert "int8" in openvino.refusals(case("integer").program, arm)[0]
    assert openvino.refusals(case("residual").program, arm) == ()


def with_signature(program, **changes):
    return dataclasses.replace(program, signature=dataclasses.replace(program.signature, **changes))


def test_types_that_it_narrows_without_a_word_are_refused(case, profile):
    program = case("transformer").program
    wide = with_signature(program, values={"ids": (0, 2**31)})
    assert "beyond 32 bits" in openvino.refusals(wide, profile("x86-cpu"))[0]
    assert openvino.refusals(with_signature(program, values={"ids": (-(2**31), 2**31 - 1)}), profile("x86-cpu")) == ()
    double = TensorSpec(name="hidden", dtype="float64", shape=("batch",))
    assert "float64" in openvino.refusals(with_signature(program, outputs=(double,)), profile("x86-cpu"))[0]


def test_operators_of_other_domains_are_refused_by_name(case, profile, tmp_path):
    graph = helper.make_graph(
        [helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 3])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    spec = case("residual").program.signature
    signature = dataclasses.replace(
        spec, axes={}, values={}, output_structure={"kind": "tensor", "index": 0},
        inputs=(TensorSpec(name="x", dtype="float32", shape=(3, 3)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(3, 3)),),
    )  # fmt: skip
    program = OnnxGraph(signature=signature, reference=(), model=model)
    lowered = openvino.lower(program, profile("x86-cpu"), tmp_path)
    assert not lowered.candidates and "com.microsoft::Gelu" in lowered.refused[0].reason


def with_bf16(tmp_path, features):
    (tmp_path / "box.yaml").write_text(
        "base: x86-cpu\nbackends: [openvino, torchscript]\n"
        f"precision: {{allowed: [fp32, bf16]}}\ntarget: {{cpu_features: [{features}]}}\n"
    )
    return load_profile(str(tmp_path / "box.yaml"))


def test_bf16_is_the_fp32_file_loaded_with_another_flag(case, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    lowered = openvino.lower(case("residual").program, with_bf16(tmp_path, "avx2, amx_bf16"), out)
    assert lowered.files == ("float.onnx",) and not lowered.refused
    fp32, bf16 = lowered.candidates
    assert (bf16.name, bf16.precision, bf16.file) == ("openvino-bf16", "bf16", fp32.file)
    assert bf16.flags == {**fp32.flags, "inference_precision": "bf16"}


def test_bf16_is_refused_where_the_profile_names_no_cpu_that_has_it(case, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    profile = with_bf16(tmp_path, "avx2, avx512_vnni")
    assert precisions_of(profile, "openvino") == ("fp32",) and precisions_of(profile, "torchscript") == ("fp32", "bf16")
    lowered = openvino.lower(case("residual").program, profile, out)
    assert [c.name for c in lowered.candidates] == ["openvino-fp32"]
    (refused,) = lowered.refused
    assert refused.candidate == "openvino-bf16" and "amx_bf16 or avx512_bf16" in refused.reason


def test_the_integer_file_has_no_bf16_candidate(case, tmp_path):
    lowered = openvino.lower(case("unsigned").program, with_bf16(tmp_path, "amx_bf16"), tmp_path)
    assert [c.name for c in lowered.candidates] in (["openvino-int8"], [])
