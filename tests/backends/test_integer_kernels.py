"""What onnxruntime's optimized graph says of a file: integer kernels, float ones, and the boundaries between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeopt.backends.integer_kernels import Boundary, kernels
from edgeopt.errors import LoweringError


def saved(folder: Path, nodes: list, stored: dict[str, np.ndarray], shape=(1, 4, 8, 8)) -> Path:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in stored.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def pair(source: str, to: str, scale: str = "s", zero: str = "z") -> list:
    return [
        helper.make_node("QuantizeLinear", [source, scale, zero], [f"{to}_q"]),
        helper.make_node("DequantizeLinear", [f"{to}_q", scale, zero], [to]),
    ]


def conv(source: str, to: str, weight: str = "w") -> list:
    return [
        helper.make_node("DequantizeLinear", [weight, "ws", "wz"], [f"{to}_w"]),
        helper.make_node("Conv", [source, f"{to}_w"], [to], kernel_shape=[1, 1]),
    ]


STORED = {
    "s": np.float32(0.02), "z": np.uint8(128), "s2": np.float32(0.05), "ws": np.float32(0.01), "wz": np.int8(0),
    "w": np.arange(-8, 8, dtype=np.int8).reshape(4, 4, 1, 1),
}  # fmt: skip


def test_a_convolution_with_pairs_on_both_sides_is_an_integer_kernel(tmp_path):
    found = kernels(saved(tmp_path, [*pair("x", "a"), *conv("a", "b"), *pair("b", "y", "s2")], STORED))
    assert found.integer["QLinearConv"] == 1 and not found.floats and not found.boundaries
    assert found.integer_products == found.integer_count == 1 and found.float_products == 0
    assert found.quantizes == {"DequantizeLinear": 1, "QuantizeLinear": 1}


def test_a_convolution_without_a_pair_behind_it_stays_float(tmp_path):
    found = kernels(saved(tmp_path, [*pair("x", "a"), *conv("a", "y")], STORED))
    assert found.integer_products == 0 and found.float_products == 1


def test_a_float_file_has_no_integer_kernel(tmp_path):
    nodes = [helper.make_node("Conv", ["x", "f"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    found = kernels(saved(tmp_path, nodes, {"f": np.ones((4, 4, 1, 1), np.float32)}))
    assert not found.integer and found.float_products == 1 and not found.boundaries


def test_the_float_operators_between_integers_are_named(tmp_path):
    nodes = [
        *pair("x", "a"), *conv("a", "b"), *pair("b", "c", "s2"),
        helper.make_node("Tanh", ["c"], ["d"], name="bent"), helper.make_node("Sin", ["d"], ["e"], name="waved"),
        *pair("e", "f"), *conv("f", "g"), *pair("g", "y", "s2"),
    ]  # fmt: skip
    found = kernels(saved(tmp_path, nodes, STORED))
    assert found.integer["QLinearConv"] == 2 and found.floats == {"Sin": 1, "Tanh": 1}
    assert found.boundaries == (Boundary(("Tanh", "Sin"), ("bent", "waved")),)
    assert str(found.boundaries[0]) == "Tanh -> Sin (waved)"


def test_float_operators_before_the_first_and_after_the_last_integer_are_no_boundary(tmp_path):
    nodes = [
        helper.make_node("Sin", ["x"], ["s0"]), *pair("s0", "a"), *conv("a", "b"), *pair("b", "c", "s2"),
        helper.make_node("Tanh", ["c"], ["y"]),
    ]  # fmt: skip
    found = kernels(saved(tmp_path, nodes, STORED))
    assert found.floats == {"Sin": 1, "Tanh": 1} and not found.boundaries


@pytest.mark.parametrize("kind", ["MatMul", "dynamic"])
def test_products_on_integers_are_counted_in_every_form(kind, tmp_path):
    stored = {**STORED, "m": np.ones((8, 8), np.int8)}
    if kind == "MatMul":
        product = [
            *pair("x", "a"), helper.make_node("DequantizeLinear", ["m", "ws", "wz"], ["mw"]),
            helper.make_node("MatMul", ["a", "mw"], ["y"]),
        ]  # fmt: skip
    else:
        product = [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"]),
            helper.make_node("MatMulInteger", ["q", "m", "qz"], ["i"]),
            helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["f", "qs"], ["y"]),
        ]
    found = kernels(saved(tmp_path, product, stored))
    assert found.integer_products == 1 and found.float_products == 0


def test_a_file_that_cannot_be_loaded_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(LoweringError, match="onnxruntime cannot load the file"):
        kernels(tmp_path / "model.onnx")
