"""Scripted parts in ONNX: each written alone by the exporter that knows control flow, and put in its operator's place.

torch's exporter of today leaves a part as a node of a domain of its own. The older exporter writes scripts: If, Loop,
LSTM and GRU with sizes that vary. What it writes is run in onnxruntime against the part, on the part's examples and
on other values of their sizes, so that branches go both ways, before it is put in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import GraphProto, ModelProto, NodeProto, helper

from edgeopt.backends import equality, onnx_legacy
from edgeopt.backends.onnx_file import opset_of
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import ExportedGraph
from edgeopt.program.onnx_session import open_session
from edgeopt.program.onnx_walk import bodies
from edgeopt.program.parts import NAMESPACE, Part, parts_of, register, variants

_TYPES = {
    "float64": "double", "float32": "float", "float16": "float16", "int64": "int64", "int32": "int32",
    "int16": "int16", "int8": "int8", "uint8": "uint8", "bool": "bool",
}  # fmt: skip

_SMALL_BYTES = 256  # a shape or an axis, which reads better where it is used


def translations(program: ExportedGraph) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """For torch.onnx.export's `custom_translation_table`: each part's operator as a node of the domain NAMESPACE."""
    return {register(part): _node(part) for part in parts_of(program.module)}


def placed(model: ModelProto, program: ExportedGraph) -> ModelProto:
    """`model` with the parts' own operators in place of their nodes, in the model's opset.

    Raises LoweringError that names the part where it cannot be written, or would give other values.
    """
    parts = parts_of(program.module)
    if not parts:
        return model
    placing = _Placing(model, {part.name: _written(part, opset_of(model)) for part in parts})
    placing.place(model.graph)
    for i in reversed([i for i, entry in enumerate(model.opset_import) if entry.domain == NAMESPACE]):
        del model.opset_import[i]
    return model


def _node(part: Part) -> Callable[..., Any]:
    from onnxscript import values  # the exporter's own representation of operators; slow to import

    def formal(name: str, dtype: str) -> onnx.defs.OpSchema.FormalParameter:
        return onnx.defs.OpSchema.FormalParameter(name, f"tensor({_TYPES[dtype]})")

    schema = onnx.defs.OpSchema(
        part.name, NAMESPACE, 1,
        inputs=[formal(f"x{i}", given.dtype) for i, given in enumerate(part.inputs)],
        outputs=[formal(f"y{i}", given.dtype) for i, given in enumerate(part.outputs)],
    )  # fmt: skip
    operator = values.Op(values.Opset(NAMESPACE, 1), part.name, schema)
    return lambda *args: operator(*args)


def _written(part: Part, opset: int) -> GraphProto:
    """The part alone as an ONNX graph of inputs x0, x1, ... and outputs y0, y1, ..., proved equal to it."""
    inputs = [f"x{i}" for i in range(len(part.inputs))]
    outputs = [f"y{i}" for i in range(len(part.outputs))]
    varying = {
        name: {axis: f"{name}_{axis}" for axis, size in enumerate(given.shape) if size is None}
        for name, given in zip(inputs, part.inputs, strict=True)
    } | {
        name: {axis: f"{name}_{axis}" for axis, size in enumerate(given.shape) if size.times}
        for name, given in zip(outputs, part.outputs, strict=True)
    }
    try:
        model = onnx_legacy.written(part.module, part.examples[-1], opset, inputs, outputs, varying)
    except Exception as why:  # the exporter raises whatever its translations raise
        raise LoweringError(
            f"torch's older ONNX exporter cannot write the scripted part '{part.label}': {first_line(why)}"
        ) from why
    foreign = {entry.domain for entry in model.opset_import} - {"", "ai.onnx"}
    if foreign:
        raise LoweringError(f"the scripted part '{part.label}' needs operators of {', '.join(sorted(foreign))}")
    _store_constants(model.graph)
    _give_outputs_nodes(model.graph)
    _prove(part, model, inputs, outputs)
    return model.graph


def _store_constants(graph: GraphProto) -> None:
    """Weights in nodes become stored tensors: those may lie in a file of their own, and two calls share them."""
    for node in [n for n in graph.node if n.op_type == "Constant"]:
        tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if tensor is not None and tensor.ByteSize() > _SMALL_BYTES:
            graph.initializer.append(tensor)
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)


def _give_outputs_nodes(graph: GraphProto) -> None:
    """An output that is an input, a weight or another output becomes a copy of it, so that it can be renamed."""
    made = {name for node in graph.node for name in node.output}
    seen: set[str] = set()
    for output in graph.output:
        if output.name not in made or output.name in seen:
            new = f"{output.name}_copy_{len(seen)}"
            graph.node.append(helper.make_node("Identity", [output.name], [new]))
            output.name = new
        seen.add(output.name)


def _prove(part: Part, model: ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    what = f"the scripted part '{part.label}'"
    try:
        session = open_session(model.SerializeToString())
    except Exception as why:
        raise LoweringError(f"onnxruntime cannot load {what}: {first_line(why)}") from why
    read = {value.name for value in session.get_inputs()}
    for example in part.examples:
        for tensors in variants(example):
            wanted = _own_answer(part, tensors)
            if wanted is None:
                continue  # such values are no valid input of it
            words = f"in {what} for inputs of " + " and ".join(str(list(t.shape)) for t in tensors)
            feeds = {name: t.numpy() for name, t in zip(inputs, tensors, strict=True) if name in read}
            try:
                found = session.run(None, feeds)
            except Exception as why:
                raise LoweringError(f"onnxruntime fails {words}: {first_line(why)}") from why
            named = {name: t.numpy() for name, t in zip(outputs, wanted, strict=True)}
            got = dict(zip(outputs, found, strict=True))
            equality.require(named, got, equality.FLOAT, words=words, file="float.onnx")


def _own_answer(part: Part, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    try:
        with torch.no_grad():
            return part.module(*tensors)
    except RuntimeError:
        return None


@dataclass
class _Placing:
    """`graphs`: what to put in for a node, by the node's operator; `stored`: the names of weights by their content."""

    model: ModelProto
    graphs: dict[str, GraphProto]
    stored: dict[bytes, str] = field(default_factory=dict)
    calls: int = 0

    def place(self, graph: GraphProto) -> None:
        nodes: list[NodeProto] = []
        for node in graph.node:
            for inner in bodies(node):
                self.place(inner)
            nodes += self._inside(node) if node.domain == NAMESPACE else [node]
        del graph.node[:]
        graph.node.extend(nodes)

    def _inside(self, node: NodeProto) -> list[NodeProto]:
        number = list(self.graphs).index(node.op_type)
        graph = GraphProto()
        graph.CopyFrom(self.graphs[node.op_type])
        self.calls += 1
        names = self._store(graph, f"part{number}") | {f"x{i}": name for i, name in enumerate(node.input)}
        names |= {v.name: name for v, name in zip(graph.output, node.output, strict=False) if name}
        prefix = f"part{number}/call{self.calls}"
        _rename(graph, lambda name: names.get(name, _below(prefix, name)))
        return list(graph.node)

    def _store(self, graph: GraphProto, prefix: str) -> dict[str, str]:
        """Move the graph's weights to the model, equal ones once; their names there."""
        names = {}
        for tensor in graph.initializer:
            own, tensor.name = tensor.name, ""
            content = tensor.SerializeToString(deterministic=True)
            if content not in self.stored:
                self.stored[content] = _below(prefix, own)
                self.model.graph.initializer.append(tensor)
                self.model.graph.initializer[-1].name = self.stored[content]
            names[own] = self.stored[content]
        del graph.initializer[:]
        return names


def _below(prefix: str, name: str) -> str:
    return prefix + name if name.startswith("/") else f"{prefix}/{name}"


def _rename(graph: GraphProto, name: Callable[[str], str]) -> None:
    """Give every value and node of the graph, and of the graphs inside it, the name that `name` makes of its own."""
    for tensor in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
        tensor.name = name(tensor.name)
    for node in graph.node:
        node.name = name(node.name) if node.name else ""
        node.input[:] = [name(each) if each else "" for each in node.input]
        node.output[:] = [name(each) if each else "" for each in node.output]
        for inner in bodies(node):
            _rename(inner, name)
