"""Each operator whose form changed: rewritten for an older opset, it computes the same; else it is refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeopt.backends import opset
from edgeopt.errors import LoweringError

X = np.linspace(-3, 4, 2 * 6 * 5 * 4, dtype=np.float32).reshape(2, 6, 5, 4)


def model(nodes, *, version=18, constants=None, outputs=("y",), kind=TensorProto.FLOAT, shape=("n", 6, 5, 4)):
    """A model of input x that gives `outputs`; constants: name -> array."""
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=9)
    made = onnx.shape_inference.infer_shapes(made)
    for output in made.graph.output:  # the checker wants a type, which onnx infers for all but a few
        if not output.type.tensor_type.elem_type:
            output.CopyFrom(helper.make_tensor_value_info(output.name, kind, [None] * len(shape)))
    return made


def node(op, inputs=("x",), outputs=("y",), **attributes):
    return helper.make_node(op, list(inputs), list(outputs), name=f"the_{op}", **attributes)


def run(made, x=X):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    return session.run(None, {"x": x})


I64 = np.int64
CASES = {
    "axes of a reduction": (17, [node("ReduceMean", ("x", "axes"), keepdims=0)], {"axes": I64([1, -1])}),
    "all axes": (17, [node("ReduceMax")], {}),
    "no axes, no reduction": (
        17, [node("ReduceMean", ("x", "axes"), noop_with_empty_axes=1)], {"axes": np.zeros(0, I64)},
    ),
    "log sum exp": (13, [node("ReduceLogSumExp", ("x", "axes"))], {"axes": I64([2])}),
    "sum keeps its input": (13, [node("ReduceSum", ("x", "axes"))], {"axes": I64([2])}),
    "pads of some axes": (
        17, [node("Pad", ("x", "pads", "", "axes"), mode="reflect")], {"pads": I64([1, 0, 2, 1]), "axes": I64([2, -1])},
    ),
    "pads with a value": (
        13, [node("Pad", ("x", "pads", "value", "axes"))],
        {"pads": I64([1, 2]), "value": np.float32(7), "axes": I64([3])},
    ),
    "uneven split": (17, [node("Split", outputs=("y", "z"), axis=2, num_outputs=2)], {}),
    "split of known sizes": (13, [node("Split", ("x", "sizes"), ("y", "z"), axis=1)], {"sizes": I64([1, 5])}),
    "resize of all axes": (
        13,
        [node("Resize", ("x", "", "scales"), axes=[0, 1, 2, 3], mode="linear", antialias=0)],
        {"scales": np.float32([1, 1, 2, 3])},
    ),
    "a range of the shape": (14, [node("Shape", start=1, end=-1)], {}),
    "the whole shape": (14, [node("Shape", start=0)], {}),
    "the last sizes": (14, [node("Shape", start=-2)], {}),
    "reshape that allows zero": (13, [node("Reshape", ("x", "shape"), allowzero=1)], {"shape": I64([-1, 20])}),
    "layer norm": (
        13, [node("LayerNormalization", ("x", "w", "b"))],
        {"w": np.float32([1, 2, 3, 4]), "b": np.float32([4, 3, 2, 1])},
    ),
    "layer norm of an axis, no bias": (
        16, [node("LayerNormalization", ("x", "w"), axis=2, epsilon=0.1)], {"w": np.full((5, 4), 2, np.float32)},
    ),
    "mish": (17, [node("Mish")], {}),
    "hard swish": (13, [node("HardSwish")], {}),
    "group norm": (
        13, [node("GroupNormalization", ("x", "w", "b"), num_groups=2)],
        {"w": np.float32([1, 2]), "b": np.float32([3, 4])},
    ),
    "scatter that replaces": (
        13, [node("ScatterElements", ("x", "at", "new"), axis=1, reduction="none")],
        {"at": np.zeros((1, 1, 1, 1), I64), "new": np.full((1, 1, 1, 1), 9, np.float32)},
    ),
    "scatter that adds": (
        16, [node("ScatterElements", ("x", "at", "new"), axis=1, reduction="add")],
        {"at": np.zeros((1, 1, 1, 1), I64), "new": np.full((1, 1, 1, 1), 9, np.float32)},
    ),
    "batch norm": (
        13, [node("BatchNormalization", ("x", "w", "w", "w", "w"), training_mode=0)],
        {"w": np.float32([1, 2, 3, 4, 5, 6])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_operator_computes_the_same(name):
    version, nodes, constants = CASES[name]
    outputs = tuple(out for n in nodes for out in n.output)
    given = model(nodes, constants=constants, outputs=outputs)
    found = opset.lowered(given, version)
    assert [o.version for o in found.opset_import] == [version]
    onnx.checker.check_model(found, full_check=True)
    for expected, value in zip(run(given), run(found), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert [o.version for o in given.opset_import] == [18]  # the model given is not changed


def test_layer_norm_far_from_zero_does_not_cancel():
    x = (X * 1e-2 + 1000).astype(np.float32)
    given = model([node("LayerNormalization", ("x", "w"))], constants={"w": np.ones(4, np.float32)})
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    (found,) = run(opset.lowered(given, 13), x)
    assert np.abs(found - exact).max() < 2e-2  # float32 holds 1000 in steps of 6e-5, a hundredth of the deviation


def test_constants_that_went_into_attributes_are_dropped():
    given = model([node("ReduceMean", ("x", "axes"))], constants={"axes": I64([1])})
    assert list(opset.lowered(given, 17).graph.initializer) == []


def test_operators_inside_a_branch_are_rewritten():
    def branch(name, axes):
        out = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [None] * 3)
        return helper.make_graph([node("ReduceMean", ("x", axes), (f"{name}_y",), keepdims=0)], name, [], [out])

    nodes = [
        node("ReduceMax", outputs=("most",), keepdims=0),
        node("Greater", ("most", "limit"), ("positive",)),
        node("If", ("positive",), then_branch=branch("then", "one"), else_branch=branch("else", "two")),
    ]
    constants = {"limit": np.float32(0), "one": I64([1]), "two": I64([2])}
    given = model(nodes, constants=constants)
    found = opset.lowered(given, 17)
    onnx.checker.check_model(found, full_check=True)
    for x in (X, -1 - np.abs(X)):
        np.testing.assert_allclose(run(found, x)[0], run(given, x)[0], rtol=1e-6)


@pytest.mark.parametrize(
    "version, nodes, constants, says",
    [
        (
            17, [node("Resize", ("x", "", "s"), mode="linear", antialias=1)], {"s": np.float32([1, 1, 2, 2])},
            "antialias=1",
        ),
        (
            17, [node("Resize", ("x", "", "s"), axes=[2, 3], mode="linear")], {"s": np.float32([2, 2])},
            "'Resize' with sizes of some axes",
        ),
        (
            17, [node("ScatterElements", ("x", "at", "new"), reduction="max")],
            {"at": np.zeros((1, 1, 1, 1), I64), "new": np.ones((1, 1, 1, 1), np.float32)}, "reduction=max",
        ),
        (13, [node("Trilu")], {}, "'Trilu' came after opset 13"),
        (
            17, [node("ReduceL2", ("x", "axes"), noop_with_empty_axes=1)], {"axes": np.zeros(0, I64)},
            "'ReduceL2' with noop_with_empty_axes",
        ),
        (
            17, [node("Shape", outputs=("s",), start=0, end=1), node("ReduceMean", ("x", "s"))], {},
            "axes that are computed",
        ),
        (12, [node("Relu")], {}, "opset 12 is older than 13"),
    ],
)  # fmt: skip
def test_what_has_no_older_form_is_refused_by_name(version, nodes, constants, says):
    with pytest.raises(LoweringError, match=says):
        opset.lowered(model(nodes, constants=constants), version)


@pytest.mark.parametrize("version", [20, 18, 17, 13])
def test_a_file_of_opset_21_comes_down(version):
    nodes = [node("Gelu", outputs=("g",)), node("ReduceMean", ("g", "axes"))]
    given = model(nodes, version=21, constants={"axes": I64([1])})
    found = opset.lowered(given, version)
    assert [o.version for o in found.opset_import if o.domain == ""] == [version]
    onnx.checker.check_model(found, full_check=True)
    np.testing.assert_allclose(run(found)[0], run(given)[0], rtol=1e-5, atol=1e-6)


def test_a_model_that_is_old_enough_stays_as_it_is():
    given = model([node("Relu")], version=13)
    assert opset.lowered(given, 17) is given
