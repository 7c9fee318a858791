"""Operators whose form changed after opset 13, each rewritten for an older one.

A rewrite takes a node and gives the nodes that stand for it. What has no older form raises LoweringError. Versions
and meanings are those of onnx's Operators.md and Changelog.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeopt.errors import LoweringError

Nodes = list[onnx.NodeProto]


@dataclass(frozen=True)
class Context:
    """The opset to write, and what is known of values by name: constants, shapes (None: unknown), element types."""

    opset: int
    constants: dict[str, np.ndarray]
    shapes: dict[str, tuple[int | None, ...]]
    types: dict[str, int]

    @classmethod
    def of(cls, model: onnx.ModelProto, opset: int) -> Context:
        """What `model` and onnx's shape inference say."""
        if model.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
            model = onnx.shape_inference.infer_shapes(model)
        values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
        tensors = {v.name: v.type.tensor_type for v in values}
        shapes = {
            name: tuple(d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim)
            for name, t in tensors.items()
            if t.HasField("shape")
        }
        return cls(opset, {}, shapes, {name: t.elem_type for name, t in tensors.items()})

    def within(self, constants: dict[str, np.ndarray]) -> Context:
        """The context inside a graph with further constants."""
        return dataclasses.replace(self, constants={**self.constants, **constants})

    def refuse(self, node: onnx.NodeProto, what: str) -> LoweringError:
        return LoweringError(
            f"the operator '{node.op_type}' with {what} has no form in opset {self.opset} (node '{node.name}')"
        )

    def rank(self, node: onnx.NodeProto, name: str) -> int:
        shape = self.shapes.get(name)
        if shape is None:
            raise self.refuse(node, "an input of unknown rank")
        return len(shape)


def constants_of(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Values of a graph's small initializers and Constant nodes: axes, pads, sizes."""
    small = {t.name: numpy_helper.to_array(t) for t in graph.initializer if np.prod(t.dims) <= 64}
    for node in graph.node:
        if node.op_type == "Constant":
            attribute = node.attribute[0]
            value = helper.get_attribute_value(attribute)
            if attribute.name == "value":
                small[node.output[0]] = numpy_helper.to_array(value)
            elif attribute.name in ("value_int", "value_ints"):
                small[node.output[0]] = np.asarray(value, np.int64)
    return small


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The graph's nodes and those of its inner graphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(attribute.g)


def drop_unused(graph: onnx.GraphProto) -> None:
    """Drop constants that nothing reads any more."""
    used = {name for node in nodes_of(graph) for name in node.input}
    used.update(value.name for node in nodes_of(graph) for a in node.attribute for value in a.g.output)
    used.update(value.name for value in graph.output)
    kept = [t for t in graph.initializer if t.name in used]
    nodes = [n for n in graph.node if n.op_type != "Constant" or n.output[0] in used]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _input(node: onnx.NodeProto, i: int) -> str:
    """The name of the node's input i, '' where it is left out."""
    return node.input[i] if len(node.input) > i else ""


def _node(node: onnx.NodeProto, inputs: list[str], attributes: dict[str, Any]) -> onnx.NodeProto:
    """The node with other inputs and attributes."""
    while inputs and inputs[-1] == "":
        inputs = inputs[:-1]
    return helper.make_node(node.op_type, inputs, list(node.output), name=node.name, **attributes)


def _constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], name=name, value=numpy_helper.from_array(value))


def _without(*defaults: tuple[str, Any]) -> Callable[[onnx.NodeProto, Context], Nodes]:
    """A rewrite that drops attributes which the older form lacks, where they have the value that it implies."""

    def rewrite(node: onnx.NodeProto, context: Context) -> Nodes:
        attributes = _attributes(node)
        for name, implied in defaults:
            value = attributes.pop(name, implied)
            if value != implied:
                shown = value.decode() if isinstance(value, bytes) else value
                raise context.refuse(node, f"{name}={shown}")
        return [_node(node, list(node.input), attributes)]

    return rewrite


def _reduce(node: onnx.NodeProto, context: Context) -> Nodes:
    """18 made `axes` an input; no axes mean all of them, or none with noop_with_empty_axes."""
    attributes = _attributes(node)
    noop = attributes.pop("noop_with_empty_axes", 0)
    axes = np.zeros(0, np.int64)
    if _input(node, 1):
        if _input(node, 1) not in context.constants:
            raise context.refuse(node, "axes that are computed")
        axes = context.constants[node.input[1]]
    if axes.size == 0 and noop:
        if node.op_type not in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"):
            # the text says that nothing is reduced, and onnxruntime still takes the square, the logarithm ...
            raise context.refuse(node, "noop_with_empty_axes")
        return [helper.make_node("Identity", [node.input[0]], list(node.output), name=node.name)]
    if axes.size:
        attributes["axes"] = [int(a) for a in axes.reshape(-1)]
    return [_node(node, [node.input[0]], attributes)]


def _pad(node: onnx.NodeProto, context: Context) -> Nodes:
    """18 lets `pads` speak of some `axes` only; the older form wants all of them."""
    axes_name = _input(node, 3)
    if not axes_name:
        return [node]
    if axes_name not in context.constants or node.input[1] not in context.constants:
        raise context.refuse(node, "axes or pads that are computed")
    axes = context.constants[axes_name].reshape(-1)
    pads = context.constants[node.input[1]].reshape(2, -1)
    full = np.zeros((2, context.rank(node, node.input[0])), np.int64)
    full[:, axes] = pads
    name = f"{node.output[0]}_pads"
    inputs = [node.input[0], name, _input(node, 2)]
    return [_constant(name, full.reshape(-1)), _node(node, inputs, _attributes(node))]


def _split(node: onnx.NodeProto, context: Context) -> Nodes:
    """18 counts the outputs in an attribute, and lets the last one be smaller."""
    attributes = _attributes(node)
    count = attributes.pop("num_outputs", None)
    if count is None or _input(node, 1):
        return [_node(node, list(node.input), attributes)]
    shape = context.shapes.get(node.input[0])
    size = shape[attributes.get("axis", 0)] if shape else None
    if size is None:
        raise context.refuse(node, "num_outputs of an axis of unknown size")
    each = -(-size // count)
    sizes = np.asarray([each] * (count - 1) + [size - each * (count - 1)], np.int64)
    name = f"{node.output[0]}_split"
    return [_constant(name, sizes), _node(node, [node.input[0], name], attributes)]


def _resize(node: onnx.NodeProto, context: Context) -> Nodes:
    """18 added antialias, a policy for the aspect ratio, and sizes of some axes only."""
    attributes = _attributes(node)
    axes = attributes.pop("axes", None)
    if axes is not None and list(axes) != list(range(context.rank(node, node.input[0]))):
        raise context.refuse(node, "sizes of some axes only")
    plain = _node(node, list(node.input), attributes)
    return _without(("antialias", 0), ("keep_aspect_ratio_policy", b"stretch"))(plain, context)


def _scatter(node: onnx.NodeProto, context: Context) -> Nodes:
    """16 added `reduction`, 18 its values max and min."""
    reduction = _attributes(node).get("reduction", b"none")
    if context.opset >= 16 and reduction in (b"none", b"add", b"mul"):
        return [node]
    return _without(("reduction", b"none"))(node, context)


def _shape(node: onnx.NodeProto, context: Context) -> Nodes:
    """15 lets Shape give a range of the sizes."""
    attributes = _attributes(node)
    if attributes.get("start", 0) == 0 and "end" not in attributes:
        return [_node(node, list(node.input), {})]
    whole, name = f"{node.output[0]}_whole", node.output[0]
    start, end = attributes.get("start", 0), attributes.get("end", np.iinfo(np.int64).max)
    return [
        helper.make_node("Shape", [node.input[0]], [whole], name=node.name),
        _constant(f"{name}_start", np.asarray([start], np.int64)),
        _constant(f"{name}_end", np.asarray([end], np.int64)),
        helper.make_node("Slice", [whole, f"{name}_start", f"{name}_end"], [name], name=f"{name}_range"),
    ]


def _reshape(node: onnx.NodeProto, context: Context) -> Nodes:
    """14 lets a 0 in the shape mean 0; before, it means 'as in the input'. No axis of ours can be empty."""
    attributes = _attributes(node)
    shape = context.constants.get(node.input[1])
    if attributes.pop("allowzero", 0) and shape is not None and 0 in shape:
        raise context.refuse(node, "a size of 0")
    return [_node(node, list(node.input), attributes)]


def _layer_normalization(node: onnx.NodeProto, context: Context) -> Nodes:
    """(x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias; the operator came with 17.

    onnx's own body takes mean(x^2) - mean(x)^2, which cancels for inputs far from 0.
    """
    if any(node.output[1:]):
        raise context.refuse(node, "its mean or deviation as outputs")
    attributes = _attributes(node)
    axis = attributes.get("axis", -1)
    axes = list(range(axis, 0)) if axis < 0 else list(range(axis, context.rank(node, node.input[0])))
    kind = context.types.get(node.input[0], onnx.TensorProto.FLOAT)
    epsilon = np.asarray(attributes.get("epsilon", 1e-5), helper.tensor_dtype_to_np_dtype(kind))
    x, out = node.input[0], node.output[0]
    nodes = [_constant(f"{out}_epsilon", epsilon)]

    def add(op: str, inputs: list[str], suffix: str, **given: Any) -> str:
        name = f"{out}_{suffix}" if suffix else out
        nodes.append(helper.make_node(op, inputs, [name], name=name, **given))
        return name

    mean = add("ReduceMean", [x], "mean", axes=axes, keepdims=1)
    centred = add("Sub", [x, mean], "centred")
    square = add("Mul", [centred, centred], "square")
    variance = add("ReduceMean", [square], "variance", axes=axes, keepdims=1)
    deviation = add("Sqrt", [add("Add", [variance, f"{out}_epsilon"], "shifted")], "deviation")
    normal = add("Div", [centred, deviation], "normal")
    bias = _input(node, 2)
    scaled = add("Mul", [normal, node.input[1]], "scaled" if bias else "")
    if bias:
        add("Add", [scaled, bias], "")
    return nodes


# operator -> (the opset that changed its form, the rewrite for older ones)
REWRITES: dict[str, tuple[int, Callable[[onnx.NodeProto, Context], Nodes]]] = {
    "ReduceL1": (18, _reduce),
    "ReduceL2": (18, _reduce),
    "ReduceLogSum": (18, _reduce),
    "ReduceLogSumExp": (18, _reduce),
    "ReduceMax": (18, _reduce),
    "ReduceMean": (18, _reduce),
    "ReduceMin": (18, _reduce),
    "ReduceProd": (18, _reduce),
    "ReduceSumSquare": (18, _reduce),
    "Pad": (18, _pad),
    "Split": (18, _split),
    "Resize": (18, _resize),
    "ScatterElements": (18, _scatter),
    "ScatterND": (18, _scatter),
    "LayerNormalization": (17, _layer_normalization),
    "RoiAlign": (16, _without(("coordinate_transformation_mode", b"output_half_pixel"))),
    "Shape": (15, _shape),
    "Reshape": (14, _reshape),
    "BatchNormalization": (14, _without(("training_mode", 0))),
    "LSTM": (14, _without(("layout", 0))),
    "GRU": (14, _without(("layout", 0))),
    "RNN": (14, _without(("layout", 0))),
}
