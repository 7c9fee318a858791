"""Costs of ONNX files: the same as torch's of the module that they were written from."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edgeopt.backends import onnx_export
from edgeopt.program import OnnxGraph, onnx_walk
from edgeopt.program.costs import costs, costs_of
from tests.passes.support import optimized, program
from tests.program import networks
from tests.program.test_costs import First
from tests.program.test_graph_lines import onnx_net

EXPORTED = {
    "residual": networks.residual,
    "block": networks.block,
    "branches": networks.branches,
    "transposed": lambda: program(nn.ConvTranspose2d(6, 4, 3, 2, groups=2), ("N", 6, 5, 5)),
    "LSTM": lambda: program(First(nn.LSTM(8, 16, bidirectional=True)), (5, "N", 8)),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_a_file_costs_what_the_graph_costs(name, tmp_path):
    given = optimized(EXPORTED[name]())[0]
    onnx_export.write(given, tmp_path, opset_max=17)
    file = OnnxGraph(signature=given.signature, reference=(), model=onnx.load(tmp_path / "float.onnx"))
    for size in (1, 8):
        of_graph, of_file = costs(given, {"N": size}), costs(file, {"N": size})
        assert of_file.contraction_flops == of_graph.contraction_flops
        assert not of_file.unknown
    if name != "LSTM":  # ONNX adds the biases' halves, of which one is zero
        floats = [next(w for w in found.weights if w.dtype == "float32") for found in (of_graph, of_file)]
        assert floats[1].elements == pytest.approx(floats[0].elements, abs=16)  # scalars stand in the file
    assert of_file.branches.at_once == of_graph.branches.at_once


def test_the_peak_of_a_convolution_net_is_the_graphs(tmp_path):
    given = optimized(networks.residual())[0]
    onnx_export.write(given, tmp_path, opset_max=17)
    file = OnnxGraph(signature=given.signature, reference=(), model=onnx.load(tmp_path / "float.onnx"))
    assert costs(file, {"N": 4}).peak_activation_bytes == costs(given, {"N": 4}).peak_activation_bytes


def walked(model, **shapes):
    return costs_of(onnx_walk.walk(model, shapes, {}))


def test_integer_work_is_what_reads_dequantized_tensors_alone():
    assert walked(onnx_net(quantized=True), x=[3, 4]).integer_contractions == 0  # its weight is float
    assert walked(onnx_net(), x=[3, 4]).integer_contractions == 0
    model = onnx_net(quantized=True)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 2000), np.uint8), "w"))
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"]))
    matmul = next(node for node in model.graph.node if node.op_type == "MatMul")
    matmul.input[1] = "wd"
    found = walked(model, x=[3, 4])
    assert (found.integer_contractions, found.contractions) == (1, 1)
    assert found.weights[0].dtype == "uint8"  # what is made of it at load time is no weight besides
    assert found.read_bytes == walked(model, x=[3, 4]).read_bytes


@pytest.mark.parametrize(
    ("node", "shapes", "flops"),
    [
        (helper.make_node("Gemm", ["a", "b"], ["y"], transA=1), ((5, 3), (5, 7)), 2 * 3 * 7 * 5),
        (helper.make_node("MatMul", ["a", "b"], ["y"]), ((2, 1, 3, 4), (6, 4, 5)), 2 * 2 * 6 * 3 * 5 * 4),
        (helper.make_node("Einsum", ["a", "b"], ["y"], equation="bij,bjk->bik"), ((2, 3, 4), (2, 4, 5)), 2 * 2 * 60),
        (helper.make_node("Conv", ["a", "b"], ["y"], group=2), ((1, 4, 5, 5), (6, 2, 3, 3)), 2 * 6 * 9 * 2 * 9),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else None,
)
def test_formulas(node, shapes, flops):
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip("ab", shapes, strict=True)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)]
    )
    assert walked(model).contraction_flops == flops


def test_sizes_that_only_running_tells_are_noted_and_custom_operators_named():
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"]),
        helper.make_node("Cast", ["where"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mine", ["f"], ["y"], domain="my.domain"),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.domain", 1)]
    found = walked(helper.make_model(graph, opset_imports=opsets))
    assert found.unknown == {"my.domain.Mine": 1}
    assert any("only running" in note for note in found.notes)


def test_the_bodies_of_branches_count_once_each():
    def body(name):
        made = helper.make_node("MatMul", ["x", "w"], [name])
        return helper.make_graph([made], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 5])])

    node = helper.make_node("If", ["c"], ["y"], then_branch=body("t"), else_branch=body("e"))
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, []),
         helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 5])],
        [numpy_helper.from_array(np.ones((4, 5), np.float32), "w")],
    )  # fmt: skip
    found = walked(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert found.contraction_flops == 2 * (2 * 3 * 4 * 5)
    assert any("once each" in note for note in found.notes)
