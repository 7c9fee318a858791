"""An ONNX graph as lines of text that stay the same where the graph does, as `text` writes graphs of torch.

Values are named by operator and number, not by what an exporter called them; stored tensors by name where that is a
parameter's, else by dtype and shape, small ones by their values. A dequantization stands where it is read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edgeopt.program.onnx_walk import dtype_name, inlined, is_module_path, operator_name
from edgeopt.program.operators import Names, short_dtype

_MOST_VALUES = 4


def lines(model: ModelProto) -> tuple[str, ...]:
    """The graph, a line an input, an operator and an output; shapes as ONNX infers them, axes by name."""
    model = inlined(model)
    try:
        model = onnx.shape_inference.infer_shapes(_without_large(model), data_prop=True)
    except Exception:  # what the checker refuses is shown without shapes
        model = _without_large(model)
    writer = _Lines()
    writer.graph(model.graph, "")
    return tuple(writer.lines)


def _without_large(model: ModelProto) -> ModelProto:
    """A copy in which large tensors keep name, dtype and dims only: inference copies what it is given."""
    light = ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.graph.name = model.graph.name or "graph"
    light.graph.node.extend(model.graph.node)
    light.graph.output.extend(model.graph.output)
    stored = {tensor.name for tensor in model.graph.initializer}
    light.graph.input.extend(value for value in model.graph.input if value.name not in stored)
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= 1024 and not tensor.external_data:
            light.graph.initializer.append(tensor)
        else:
            light.graph.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            light.graph.metadata_props.append(onnx.StringStringEntryProto(key=tensor.name, value="stored"))
    return light


class _Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names = Names()
        self._words: dict[str, str] = {"": "none"}
        self._types: dict[str, str] = {}

    def graph(self, graph: GraphProto, indent: str) -> None:
        large = {entry.key for entry in graph.metadata_props}
        for value in (*graph.value_info, *graph.input, *graph.output):
            self._types[value.name] = _type(value)
        for name in large:
            self._words[name] = f"{name} {self._types[name]}" if is_module_path(name) else self._types[name]
        for tensor in graph.initializer:
            self._words[tensor.name] = _stored(tensor)
        for value in graph.input:
            self._words[value.name] = value.name
            self.lines.append(f"{indent}input {value.name} {self._types[value.name]}")
        for node in graph.node:
            self._node(node, indent)
        for value in graph.output:
            self.lines.append(f"{indent}output {value.name} = {self._words.get(value.name, value.name)}")

    def _node(self, node: NodeProto, indent: str) -> None:
        given = [self._words.get(name, name) for name in node.input]
        said = sorted((a for a in node.attribute if _said(node, a)), key=lambda a: a.name)
        attributes = [f"{a.name}={_attribute(a)}" for a in said]
        if node.op_type == "Constant":
            self._words[node.output[0]] = next(_attribute(a) for a in node.attribute)
            return
        if node.op_type == "DequantizeLinear":
            self._words[node.output[0]] = f"real({', '.join(given)})"
            return
        op = operator_name(node)
        name = self._names.name("", op)
        for number, output in enumerate(node.output):
            self._words[output] = name if len(node.output) == 1 else f"{name}[{number}]"
        types = ", ".join(self._types.get(output, "?") for output in node.output if output)
        self.lines.append(f"{indent}{name} {types} = {op}({', '.join([*given, *attributes])})")
        for attribute in node.attribute:
            for body in (attribute.g,) if attribute.type == AttributeProto.GRAPH else attribute.graphs:
                self.lines.append(f"{indent}  {attribute.name}:")
                self.graph(body, indent + "    ")


def _stored(tensor: TensorProto) -> str:
    kind = short_dtype(dtype_name(tensor.data_type))
    if math.prod(tensor.dims) <= _MOST_VALUES and not tensor.external_data:
        return f"{kind}({_values(numpy_helper.to_array(tensor))})"
    shape = f"{kind}[{', '.join(str(n) for n in tensor.dims)}]"
    return f"{tensor.name} {shape}" if is_module_path(tensor.name) else shape


def _values(array: np.ndarray) -> str:
    return ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in array.reshape(-1).tolist())


def _type(value: onnx.ValueInfoProto) -> str:
    if not value.type.HasField("tensor_type"):
        return value.type.WhichOneof("value") or "?"
    tensor = value.type.tensor_type
    kind = short_dtype(dtype_name(tensor.elem_type))
    if not tensor.HasField("shape"):
        return f"{kind}[?]"
    sizes = [str(d.dim_value) if d.HasField("dim_value") else _symbol(d.dim_param) for d in tensor.shape.dim]
    return f"{kind}[{', '.join(sizes)}]"


def _symbol(name: str) -> str:
    """An axis's name; what inference makes up for a size that it does not know is a question mark."""
    return "?" if not name or name.startswith("unk__") else name


def _said(node: NodeProto, attribute: AttributeProto) -> bool:
    """Whether an attribute says something: neither the default nor what the weight's shape tells."""
    value = helper.get_attribute_value(attribute)
    if attribute.name in ("strides", "dilations", "pads"):
        return any(n != (attribute.name != "pads") for n in value)
    if attribute.name == "kernel_shape":
        return node.op_type not in ("Conv", "ConvTranspose")
    if not onnx.defs.has(node.op_type, node.domain):
        return True
    known = onnx.defs.get_schema(node.op_type, node.domain).attributes.get(attribute.name)
    default = known.default_value if known is not None else None
    return default is None or not default.name or helper.get_attribute_value(default) != value


def _attribute(attribute: AttributeProto) -> str:
    value: Any = helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.TENSOR:
        return _stored(value)
    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return "below"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(list(value)) if hasattr(value, "__len__") and not isinstance(value, str) else str(value)
