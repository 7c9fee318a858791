"""An ONNX file walked operator by operator: sizes by ONNX's own shape inference, FLOPs by the formulas here.

Nothing is run. Operators whose sizes inference cannot tell, and those of other domains, are named as unknown. The
bodies of If, Loop and Scan count once each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx.inliner
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from edgeopt.program import estimates
from edgeopt.program.operators import Builder, Kind, Value, Walk
from edgeopt.spec.manifest import TensorSpec

_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"}
_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "FusedConv": 1}  # operator -> where its weight is
_PRODUCTS = {"MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3, "FusedMatMul": 1}
_RECURRENT = {"LSTM", "GRU", "RNN"}
_STANDARD = ("", "ai.onnx", "ai.onnx.ml")
_SMALL = 1024  # elements: larger tensors are no sizes, which is what inference reads values for


def shapes_at(inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> dict[str, list[int | str]]:
    """Each input's shape with the axes at the sizes given."""
    return {spec.name: [sizes.get(n, n) if isinstance(n, str) else n for n in spec.shape] for spec in inputs}


def name_axes(graph: GraphProto, inputs: Sequence[TensorSpec]) -> None:
    """Write the names and sizes of `inputs` over the axes that the graph's inputs leave open.

    A size that the graph fixes stays, for a check to see.
    """
    specs = {spec.name: spec for spec in inputs}
    for value in graph.input:
        if value.name not in specs:
            continue
        for dim, size in zip(value.type.tensor_type.shape.dim, specs[value.name].shape, strict=False):
            if dim.HasField("dim_value"):
                continue
            if isinstance(size, str):
                dim.dim_param = size
            else:
                dim.dim_value = size


def walk(model: ModelProto, shapes: Mapping[str, Sequence[int | str]], sizes: Mapping[str, int]) -> Walk:
    """The file's operators with its inputs at `shapes`; `sizes` are noted as those that were asked for."""
    inferred = _inferred(model, shapes)
    walker = _Walker(inferred, Builder(dict(sizes)))
    walker.graph(inferred.graph)
    return walker.done()


def is_module_path(name: str) -> bool:
    """Whether a stored tensor's name is that of a parameter in the user's model, as `features.0.weight`."""
    return bool(re.fullmatch(r"\w+(\.\w+)+", name))


def inlined(model: ModelProto) -> ModelProto:
    """The model with its own functions written out."""
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _inferred(model: ModelProto, shapes: Mapping[str, Sequence[int | str]]) -> ModelProto:
    """A copy without large tensors, its inputs of fixed sizes, every other size told by inference.

    A large tensor stays by name, dtype and dims, without its data.
    """
    model = inlined(model)
    light = ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.graph.name = model.graph.name or "graph"
    light.graph.node.extend(model.graph.node)
    for value in model.graph.input:
        light.graph.input.append(_fixed(value, shapes.get(value.name)))
    for value in model.graph.output:
        kept = light.graph.output.add()
        kept.name = value.name
    given = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _SMALL and not tensor.external_data:
            light.graph.initializer.append(tensor)
        elif tensor.name not in given:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        found = onnx.shape_inference.infer_shapes(light, data_prop=True)
    except Exception:  # custom operators, files that onnx's own checker refuses: what is known without is shown
        found = light
    found.graph.metadata_props.extend(
        onnx.StringStringEntryProto(key=tensor.name, value="stored") for tensor in model.graph.initializer
    )
    return found


def _fixed(value: onnx.ValueInfoProto, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    if shape is None:
        return value
    return helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, list(shape))


class _Walker:
    def __init__(self, model: ModelProto, builder: Builder):
        self._model, self._builder = model, builder
        self._stored = {entry.key for entry in model.graph.metadata_props}
        self._values: dict[str, Value] = {}
        self._makers: dict[str, tuple[int, ...]] = {}
        self._weight_of: dict[str, str] = {}  # a dequantized weight -> the stored one
        self._known: dict[str, tuple[str, tuple[int, ...] | None]] = {}
        self._numbers = 0
        self._unsized = 0
        self._bodies = False
        self._learn(model.graph)

    def _learn(self, graph: GraphProto) -> None:
        for tensor in graph.initializer:
            self._known[tensor.name] = (dtype_name(tensor.data_type), tuple(tensor.dims))
            self._stored.add(tensor.name)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type"):
                self._known.setdefault(value.name, (dtype_name(value.type.tensor_type.elem_type), _shape(value)))

    def graph(self, graph: GraphProto) -> None:
        for node in graph.node:
            for body in bodies(node):
                self._bodies = True
                self._learn(body)
                self.graph(body)
            self._node(node)

    def done(self) -> Walk:
        graph = self._model.graph
        inputs = {v.name: self._value(v.name) for v in graph.input if v.name not in self._stored}
        outputs = {v.name: (self._value(v.name), self._makers.get(v.name, ())) for v in graph.output}
        notes = []
        if self._unsized:
            notes.append(f"{self._unsized} operators, whose sizes only running the file tells, count nothing")
        if self._bodies:
            notes.append("the bodies of If, Loop and Scan count once each")
        return self._builder.done(inputs, outputs, tuple(notes))

    def _node(self, node: NodeProto) -> None:
        if node.op_type == "Constant":
            self._constant(node)
            return
        names = [name for name in node.input if name]
        given = [self._value(name) for name in names]
        made_names = [name for name in node.output if name]
        if any(self._sized(name) is None for name in (*names, *made_names)) and not bodies(node):
            self._unsized += 1
        stored = bool(given) and given[0].storage is None
        if node.op_type in _VIEWS and given:
            for name in made_names[:1]:
                self._values[name] = self._value(name, of=given[0])
        elif estimates.of_weight(node.op_type, stored):
            self._weight_of.update(dict.fromkeys(made_names, node.input[0]))
        made = [self._value(name) for name in made_names]
        kind, flops = self._cost(node, given, made, stored)
        at = self._builder.add(
            operator_name(node), self._path(node), given, made, flops=flops, kind=kind,
            sources={s for name in names for s in self._makers.get(name, ())},
            gathers=estimates.gathers(node.op_type),
        )  # fmt: skip
        self._makers.update(dict.fromkeys(made_names, (at,)))

    def _cost(self, node: NodeProto, given: list[Value], made: list[Value], stored: bool) -> tuple[Kind, int]:
        if node.op_type in _VIEWS and given:
            return "view", 0
        if estimates.of_weight(node.op_type, stored):
            return "constant", 0
        named = [self._sized(name) for name in node.input]
        out = self._sized(node.output[0])
        found = _contraction(node, named, out)
        if found is not None:
            return ("contraction", found) if found else ("unknown", 0)
        if node.domain not in _STANDARD:
            return "unknown", 0
        if bodies(node):
            return "other", 0
        read = max((math.prod(v.shape) for v in given), default=0)
        window = math.prod(_attribute(node, "kernel_shape", ()))
        return "other", estimates.estimated(node.op_type, read, math.prod(made[0].shape) if out else 0, window)

    def _constant(self, node: NodeProto) -> None:
        value = _attribute(node, "value", None)
        name = node.output[0]
        if isinstance(value, TensorProto):
            self._known[name] = (dtype_name(value.data_type), tuple(value.dims))
        self._stored.add(name)

    def _path(self, node: NodeProto) -> str:
        """The module that the operator belongs to: that of its weight, since files that are shipped name no modules."""
        held = (self._weight_of.get(name, name) for name in node.input)
        return next((n.rpartition(".")[0] for n in held if n in self._stored and is_module_path(n)), "")

    def _sized(self, name: str) -> tuple[int, ...] | None:
        return self._known.get(name, ("", None))[1] if name else ()

    def _value(self, name: str, *, of: Value | None = None) -> Value:
        """The value of a name; `of`: the one whose memory it shares. Sizes that nobody knows count no bytes."""
        if name in self._values:
            return self._values[name]
        dtype, shape = self._known.get(name, ("?", None))
        size = _bytes(dtype, math.prod(shape)) if shape is not None else 0
        if name in self._stored:
            self._builder.weight(name, dtype, math.prod(shape or ()), size)
        if name in self._stored or name in self._weight_of:
            number = None
        elif of is not None:
            number = of.storage
        else:
            number, self._numbers = self._numbers, self._numbers + 1
        if number is not None:
            self._builder.storage(number, size)
        value = self._values[name] = Value(dtype, shape or (), size, number)
        return value


def _contraction(node: NodeProto, given: list[tuple[int, ...] | None], out: tuple[int, ...] | None) -> int | None:
    """FLOPs of a contraction, a multiply-add as 2; 0 where a size is unknown, None for other operators.

    ONNX lays a convolution's weight out as [out, in / groups, kernel...], a transposed one's as
    [in, out / groups, kernel...] (ONNX operator specification, Conv and ConvTranspose).
    """
    op = node.op_type
    if op in _CONVOLUTIONS:
        weight = given[_CONVOLUTIONS[op]]
        return 2 * math.prod(out) * math.prod(weight[1:]) if out and weight else 0
    if op == "ConvTranspose":
        return 2 * math.prod(given[0]) * math.prod(given[1][1:]) if given[0] and given[1] else 0
    if op in _PRODUCTS:
        a, b = given[0], given[_PRODUCTS[op]]
        return 2 * math.prod(out) * a[-1] if a and b and out is not None else 0
    if op == "Gemm":
        a = given[0]
        return 2 * math.prod(out) * a[0 if _attribute(node, "transA", 0) else 1] if a and out else 0
    if op in _RECURRENT:
        x, weights, recurrent = given[:3]
        if not (x and weights and recurrent):
            return 0
        steps = x[0] * x[1]  # with layout 0 and 1 alike: time by batch, or batch by time
        return 2 * steps * (math.prod(weights) + math.prod(recurrent))
    if op == "Einsum":
        return _einsum(_attribute(node, "equation", b"").decode(), given)
    if op == "Attention" and node.domain in _STANDARD:
        return _attention(node, given)
    return None


def _einsum(equation: str, given: list[tuple[int, ...] | None]) -> int:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, given, strict=False):
        if shape is None or "." in term or len(term) != len(shape):
            return 0
        sizes.update(zip(term, shape, strict=True))
    return 2 * math.prod(sizes.values())


def _attention(node: NodeProto, given: list[tuple[int, ...] | None]) -> int:
    """ONNX's Attention (opset 23) with four axes, [batch, heads, length, size]; the fused layout is left unknown."""
    query, key, value = given[:3] if len(given) > 2 else (None, None, None)
    if not (query and key and value and len(query) == len(key) == len(value) == 4):
        return 0
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


def operator_name(node: NodeProto) -> str:
    """The operator, with its domain where that is not ONNX's own."""
    return node.op_type if node.domain in _STANDARD else f"{node.domain}.{node.op_type}"


def bodies(node: NodeProto) -> list[GraphProto]:
    """The graphs that an If, Loop or Scan holds."""
    found = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    return found + [g for a in node.attribute if a.type == AttributeProto.GRAPHS for g in a.graphs]


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    return tuple(dim.dim_value for dim in tensor.shape.dim)


def dtype_name(number: int) -> str:
    """The dtype's name as torch and numpy write it; ONNX's own for the others."""
    name = TensorProto.DataType.Name(number).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _bytes(dtype: str, elements: int) -> int:
    """Bytes of packed elements; text counts none."""
    bits = {"bool": 8, "string": 0, "undefined": 0, "complex64": 64, "complex128": 128, "?": 0}.get(dtype)
    if bits is None:
        digits = "".join(c for c in dtype.removeprefix("bfloat").removeprefix("float") if c.isdigit() or c == "e")
        found = "".join(c for c in digits.split("e")[0] if c.isdigit())
        bits = int(found) if found else 0
    return math.ceil(elements * bits / 8)
