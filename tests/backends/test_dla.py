"""The DLA's candidates: recipes and calibration files for what a device has, refusals with the reason for the rest."""

from __future__ import annotations

import struct

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from edgeopt.backends import implicit_scales, tensorrt
from edgeopt.backends.onnx_file import opset_of
from edgeopt.errors import LoweringError
from edgeopt.program import OnnxGraph, Signature
from edgeopt.spec.manifest import Axis, TensorSpec
from edgeopt.spec.profile import load_profile
from tests.backends.programs import Integer, Residual, case
from tests.quant.programs import sqnr_db

IMAGE, LOGITS = {"image": ("float32", 1, 3, 16, 16)}, {"logits": ("float32", 1, 10)}


@pytest.fixture(scope="module")
def integer():
    """A program of int8 without moving sizes."""
    torch.manual_seed(0)
    return case(Integer(Residual(), unsigned=False), IMAGE, LOGITS, integer=True).program


def foreign(model: onnx.ModelProto, *, integer: bool = False, **axes: Axis) -> OnnxGraph:
    """The program of a file with one input `x` and one output `y`, whose first size is the axis where there is one."""
    ends = []
    for value in (model.graph.input[0], model.graph.output[0]):
        sizes = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        ends.append((TensorSpec(name=value.name, dtype="float32", shape=tuple(sizes)),))
    signature = Signature(inputs=ends[0], outputs=ends[1], axes=axes, values={}, output_structure=None)
    return OnnxGraph(signature=signature, reference=(), model=model, integer=integer)


def relu(first: int | str) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [first, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


@pytest.fixture(scope="module")
def xavier(tmp_path_factory):
    return tmp_path_factory.mktemp("xavier")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder in which one program's file of one opset is written once."""
    return tmp_path_factory.mktemp("shared")


def asked(name: str = "xavier", **target: str):
    return load_profile(name, {"dla": "true", **{key.replace("__", "."): value for key, value in target.items()}})


def test_fp16_is_one_more_candidate_of_the_float_file(tmp_path):
    found = tensorrt.lower(foreign(relu(1)), asked(), tmp_path)
    assert [c.name for c in found.candidates] == ["tensorrt-fp32", "tensorrt-fp16", "tensorrt-fp16-dla"]
    recipe = found.recipes[-1]
    assert (recipe.candidate, recipe.dla, recipe.flags) == ("tensorrt-fp16-dla", True, ("fp16",))
    assert recipe.shapes == {} and not found.recipes[0].dla and found.refused == () and recipe.calibration is None


def test_int8_is_built_without_pairs_from_the_scales_of_the_pairs(integer, xavier):
    found = tensorrt.lower(integer, asked(), xavier)
    assert found.files == ("int8.onnx", "int8_dla.onnx", "int8_dla.calib")
    gpu, dla = found.recipes
    assert (gpu.onnx, gpu.dla) == (None, False)
    assert (dla.onnx, dla.calibration, dla.flags) == ("int8_dla.onnx", "int8_dla.calib", ("fp16", "int8"))
    assert found.candidates[1].file == "int8.onnx"  # what is judged here holds the same scales
    plain = onnx.load(xavier / "int8_dla.onnx")
    assert not {n.op_type for n in plain.graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    assert opset_of(plain) == 17

    lines = (xavier / "int8_dla.calib").read_text().splitlines()
    assert lines[0] == "TRT-8502-EntropyCalibration2"
    scales = {
        name: struct.unpack(">f", bytes.fromhex(text))[0] for name, text in (x.rsplit(": ", 1) for x in lines[1:])
    }
    assert scales["image"] == pytest.approx(0.01) and 0.005 in [pytest.approx(s) for s in scales.values()]
    made = {name for node in plain.graph.node for name in node.output}
    assert set(scales) - {"image"} <= made
    convolutions = [n for n in plain.graph.node if n.op_type == "Conv"]
    assert len(convolutions) == 3 and all(n.input[0] in scales and n.output[0] in scales for n in convolutions)


def test_the_file_without_pairs_computes_what_the_one_with_pairs_does_but_for_the_rounding(integer, xavier):
    tensorrt.lower(integer, asked(), xavier)
    x = np.random.default_rng(3).uniform(-1, 1, (1, 3, 16, 16)).astype(np.float32)
    answers = [
        onnxruntime.InferenceSession(xavier / name, providers=["CPUExecutionProvider"]).run(None, {"image": x})[0]
        for name in ("int8.onnx", "int8_dla.onnx")
    ]
    assert sqnr_db(*reversed(answers)) > 25
    assert not np.array_equal(*answers)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (dict(name="orin-agx", target__tensorrt='"11.2"', precision__mechanism="strong-typed"), "left with 11.0"),
        (dict(name="orin-agx", target__tensorrt='"11.4.1"', precision__mechanism="strong-typed"), "calibration"),
        (dict(name="orin-agx", precision__mechanism="strong-typed"), "no strongly typed network to the DLA"),
    ],
)  # fmt: skip
def test_what_a_version_cannot_do_is_refused_and_the_gpu_still_served(integer, shared, profile, words):
    found = tensorrt.lower(integer, asked(**profile), shared)
    assert [c.name for c in found.candidates] == ["tensorrt-int8"]
    (refused,) = found.refused
    assert refused.candidate == "tensorrt-int8-dla" and words in refused.reason


def test_moving_sizes_are_refused_with_the_axis(tmp_path):
    found = tensorrt.lower(foreign(relu("batch"), batch=Axis(min=1, opt=1, max=8)), asked(), tmp_path)
    assert {c.name for c in found.candidates} == {"tensorrt-fp32", "tensorrt-fp16"}
    (refused,) = found.refused
    assert refused.candidate == "tensorrt-fp16-dla" and "batch from 1 to 8" in refused.reason


def pairs(*, scale: float = 0.5, zero: int = 0, ends: bool = False) -> onnx.ModelProto:
    """x -> pair -> MaxPool -> Concat with itself -> Exp, or where `ends` a pair that makes the output."""
    stored = [
        numpy_helper.from_array(np.float32(scale), "s"), numpy_helper.from_array(np.int8(zero), "z"),
    ]  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MaxPool", ["d"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("Concat", ["p", "p"], ["c"], axis=1),
        helper.make_node("Exp", ["c"], ["e"]),
        helper.make_node("QuantizeLinear", ["e", "s", "z"], ["eq"]),
        helper.make_node("DequantizeLinear", ["eq", "s", "z"], ["y"]),
    ]
    if not ends:
        nodes = nodes[:4] + [helper.make_node("Exp", ["c"], ["y"])]
    graph = helper.make_graph(
        nodes, "pairs",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 3, 3])], stored,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


def translated(model: onnx.ModelProto, folder) -> implicit_scales.Implicit:
    onnx.save(model, folder / "pairs.onnx")
    return implicit_scales.write(folder / "pairs.onnx", folder, tensorrt="10.3")


def test_a_scale_follows_through_what_keeps_the_range_and_no_further(tmp_path):
    found = translated(pairs(), tmp_path)
    assert found.scales == {"x": 0.5, "p": 0.5, "c": 0.5} and found.without == ("y",)
    assert (tmp_path / "int8_dla.calib").read_text().startswith("TRT-100300-EntropyCalibration2\nc: 3f000000\n")


def test_scales_in_constant_nodes_count_and_those_found_at_run_time_are_refused(tmp_path):
    model = pairs()
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    nodes = [*constants, *model.graph.node]
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    assert translated(model, tmp_path).scales == {"x": 0.5, "p": 0.5, "c": 0.5}
    assert "Constant" not in {n.op_type for n in onnx.load(tmp_path / "int8_dla.onnx").graph.node}

    moving = pairs()
    moving.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["s2"], keepdims=0))
    moving.graph.node[1].input[1] = moving.graph.node[2].input[1] = "s2"
    with pytest.raises(LoweringError, match="found at run time"):
        translated(moving, tmp_path)


def test_an_output_that_a_pair_makes_keeps_its_name(tmp_path):
    found = translated(pairs(ends=True), tmp_path)
    model = onnx.load(tmp_path / "int8_dla.onnx")
    assert [o.name for o in model.graph.output] == ["y"] and found.scales["y"] == found.scales["e"] == 0.5


def test_a_zero_point_is_refused_and_the_gpu_still_served(tmp_path):
    with pytest.raises(LoweringError, match="'x' is not quantized by one symmetric scale"):
        translated(pairs(zero=3), tmp_path)
    found = tensorrt.lower(foreign(pairs(zero=3), integer=True), asked(), tmp_path)
    assert [c.name for c in found.candidates] == ["tensorrt-int8"] and "one symmetric scale" in found.refused[0].reason
