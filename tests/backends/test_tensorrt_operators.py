"""O04 as a kind: operator x opset x TensorRT is checked before anything is pushed, whoever wrote the file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeopt.backends import tensorrt
from edgeopt.backends.tensorrt_operators import FIRST, NONE, missing
from edgeopt.program import OnnxGraph, Signature
from edgeopt.spec.manifest import TensorSpec
from edgeopt.spec.profile import load_profile

BEFORE = {"8.2": "8.0.1", "8.4": "8.2.1", "8.5": "8.4.1", "8.6": "8.5.2", "9.2": "9.1", "10.1": "10.0", "10.4": "10.3",
          "10.5": "10.4"}  # fmt: skip


def saved(path, *nodes, kind=TensorProto.FLOAT, opset: int = 17):
    values = [helper.make_tensor_value_info(name, kind, ("n", 4)) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return path


@pytest.mark.parametrize("operator", FIRST)
def test_an_operator_is_refused_before_its_version_and_taken_from_it_on(operator, tmp_path):
    path = saved(tmp_path / "x.onnx", helper.make_node(operator, ["x"], ["y"], name="its_name"))
    first = FIRST[operator]
    assert missing(path, BEFORE[first]) == (
        f"TensorRT {BEFORE[first]} cannot read the file: the operator '{operator}' (node 'its_name') came with {first}"
    )
    assert missing(path, first) is None and missing(path, "11.0") is None


@pytest.mark.parametrize("operator", sorted(NONE))
def test_what_no_version_has_is_refused_as_far_as_versions_are_known(operator, tmp_path):
    path = saved(tmp_path / "x.onnx", helper.make_node(operator, ["x"], ["y"]))
    assert f"'{operator}' (node 'y') is in no TensorRT up to 10.6" in missing(path, "10.6.0.26")
    assert missing(path, "10.7.0") is None


def test_every_operator_that_it_names_is_one_of_onnx():
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    assert {*FIRST, *NONE} <= known and not {*FIRST} & NONE


def test_operators_in_branches_and_types_of_inputs_count_and_all_are_named(tmp_path):
    value = helper.make_tensor_value_info("b", TensorProto.FLOAT, ("n", 4))
    body = helper.make_graph([helper.make_node("Hardmax", ["x"], ["b"], name="inner")], "body", [], [value])
    nodes = [
        helper.make_node("GridSample", ["x", "x"], ["a"], name="outer"),
        helper.make_node("If", ["a"], ["y"], then_branch=body, else_branch=body),
    ]
    said = missing(saved(tmp_path / "x.onnx", *nodes, kind=TensorProto.UINT8), "8.4.1")
    for words in ("(node 'outer') came with 8.5", "(node 'inner') came with 9.2", "uint8 of 'x' came with 8.5"):
        assert words in said
    assert missing(saved(tmp_path / "own.onnx", helper.make_node("Mod", ["x"], ["y"], domain="mine")), "8.0.1") is None


def layer_norm() -> OnnxGraph:
    """A file of other people, opset 17, which TensorRT 8.4 to 8.6 read: 8.5 does not read this operator of it."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 4)) for name in ("x", "y")]
    weight = onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("LayerNormalization", ["x", "w"], ["y"], name="norm")], "g", values[:1], values[1:], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x, y = (TensorSpec(name=name, dtype="float32", shape=(2, 4)) for name in ("x", "y"))
    signature = Signature((x,), (y,), {}, {"kind": "tensor", "index": 0}, {})
    return OnnxGraph(signature=signature, reference=(), model=model)


@pytest.mark.parametrize("version, taken", [("8.5.2", False), ("8.6.1", True)])
def test_a_file_is_refused_by_the_backend_with_the_reason(version, taken, tmp_path):
    profile = load_profile("xavier")
    profile = profile.model_copy(update={"target": profile.target.model_copy(update={"tensorrt": version})})
    assert profile.target.onnx_opset_max == 17
    found = tensorrt.lower(layer_norm(), profile, tmp_path)
    if taken:
        assert [c.name for c in found.candidates] == ["tensorrt-fp32", "tensorrt-fp16"]
    else:
        assert not found.candidates and not found.files
        assert f"TensorRT {version} cannot read the file: the operator 'LayerNormalization' (node 'norm') came" in (
            found.refused[0].reason
        )
