"""Operators that the target's TensorRT does not have are refused before the build (case O04, with its whole kind)."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from edgeopt.backends import tensorrt, tensorrt_operators
from edgeopt.program import OnnxGraph, Signature
from edgeopt.spec.manifest import TensorSpec
from edgeopt.spec.profile import load_profile

ATTRIBUTES = {"GridSample": {"mode": "bilinear"}, "LayerNormalization": {"axis": -1}}


def model(op: str, opset: int, shapes: dict[str, list[int]], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """`op` of inputs of these shapes, whose last is the output's."""
    *inputs, output = shapes.items()
    graph = helper.make_graph(
        [helper.make_node(op, [name for name, _ in inputs], [output[0]], name="here", **ATTRIBUTES.get(op, {}))], op,
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs],
        [helper.make_tensor_value_info(*output[:1], kind, output[1])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


GRID = {"x": [1, 1, 4, 4], "grid": [1, 3, 3, 2], "y": [1, 1, 3, 3]}
NORM = {"x": [2, 8], "scale": [8], "bias": [8], "y": [2, 8]}


@pytest.mark.parametrize(
    ("op", "opset", "shapes", "version", "came"),
    [
        ("GridSample", 16, GRID, "8.4.1", "8.5"),
        ("GridSample", 16, GRID, "8.5.2", None),
        ("LayerNormalization", 17, NORM, "8.5.2", "8.6"),
        ("LayerNormalization", 17, NORM, "8.6.2", None),
        ("Round", 13, {"x": [2], "y": [2]}, "8.0.1", "8.2"),
        ("Relu", 13, {"x": [2], "y": [2]}, "8.0.1", None),
    ],
)
def test_each_operator_has_its_version(tmp_path, op, opset, shapes, version, came):
    onnx.save(model(op, opset, shapes), tmp_path / "a.onnx")
    found = tensorrt_operators.lacking(tmp_path / "a.onnx", version)
    assert found == (came and f"TensorRT {version} has no operator {op} (node 'here'): it came with {came}")


def test_bytes_as_an_input_came_with_8_5(tmp_path):
    onnx.save(model("Identity", 13, {"x": [2], "y": [2]}, TensorProto.UINT8), tmp_path / "a.onnx")
    assert "takes no uint8 as an input or output ('x')" in tensorrt_operators.lacking(tmp_path / "a.onnx", "8.2.1")
    assert tensorrt_operators.lacking(tmp_path / "a.onnx", "8.5.2") is None


def test_an_operator_inside_a_body_counts(tmp_path):
    inner = helper.make_graph(
        [helper.make_node("Round", ["x"], ["r"])],
        "body",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, [2])],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)], "outer",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, []), helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), tmp_path / "a.onnx")
    assert "no operator Round" in tensorrt_operators.lacking(tmp_path / "a.onnx", "8.0.1")


def program(given: onnx.ModelProto) -> OnnxGraph:
    specs = [
        tuple(
            TensorSpec(
                name=v.name, dtype="float32", shape=tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
            )
            for v in values
        )
        for values in (given.graph.input, given.graph.output)
    ]  # fmt: skip
    signature = Signature(inputs=specs[0], outputs=specs[1], axes={}, values={}, output_structure=None)
    return OnnxGraph(signature=signature, reference=(), model=given)


def test_the_build_refuses_it_with_the_node_and_writes_no_recipe(tmp_path):
    found = tensorrt.lower(program(model("LayerNormalization", 17, NORM)), load_profile("xavier"), tmp_path)
    assert not found.candidates and not found.recipes
    assert "no operator LayerNormalization (node 'here'): it came with 8.6" in found.refused[0].reason


def test_an_opset_that_the_target_does_not_read_is_refused_before_the_build(tmp_path):
    given = program(model("GridSample", 16, GRID))
    found = tensorrt.lower(given, load_profile("nano"), tmp_path)  # opset 13, which has no GridSample
    assert not found.candidates and found.refused[0].reason and not list(tmp_path.glob("*.onnx"))
