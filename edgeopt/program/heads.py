"""Softmax, argmax and top-k in the place of a model's output: on arrays, on the signature, and on a graph.

Heads are put on when a program is written for a runtime. The stages before, and the loss of a training, see the model's
own outputs, since an argmax tells nothing of how near a wrong answer was. Classes are int32, which every runtime
gives. Of equal values the first counts as larger.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from edgeopt.errors import ProjectError
from edgeopt.program import graph
from edgeopt.program.intermediate import tell_outputs
from edgeopt.program.new_nodes import call
from edgeopt.program.program import Call, ExportedGraph, Signature
from edgeopt.spec.camera import Output
from edgeopt.spec.manifest import TensorSpec
from edgeopt.spec.values import did_you_mean

Heads = Mapping[str, Output]
_aten = torch.ops.aten


def names(name: str, head: Output | None) -> tuple[str, ...]:
    """The artifact's outputs in place of the model's output `name`."""
    return (f"{name}.values", f"{name}.indices") if head is not None and head.head == "topk" else (name,)


def answers(outputs: dict[str, np.ndarray], heads: Heads) -> dict[str, np.ndarray]:
    """The model's answers with the heads on: softmax in float64, rounded once."""
    given = {}
    for name, value in outputs.items():
        found = _answer(value, heads[name]) if name in heads else (value,)
        given |= dict(zip(names(name, heads.get(name)), found, strict=True))
    return given


def _answer(value: np.ndarray, head: Output) -> tuple[np.ndarray, ...]:
    if head.head == "argmax":
        return (np.argmax(value, head.axis).astype(np.int32),)
    if head.head == "topk":
        order = np.argsort(-value.astype(np.float64), head.axis, kind="stable")
        indices = np.take(order, range(head.k), head.axis)
        return np.take_along_axis(value, indices, head.axis), indices.astype(np.int32)
    powers = np.exp(value.astype(np.float64) - value.max(head.axis, keepdims=True))
    return ((powers / powers.sum(head.axis, keepdims=True)).astype(value.dtype),)


def signature(given: Signature, heads: Heads) -> Signature:
    """The signature with the heads on; ProjectError for an output that is not there, or has no such classes."""
    for name in heads:
        if name not in given.output_names:
            near = did_you_mean(name, list(given.output_names))
            raise ProjectError(
                f"the model has no output '{name}'" + (f", did you mean '{near}'?" if near else ""),
                where=f"key 'outputs.{name}'", todo="its outputs are: " + ", ".join(given.output_names),
            )  # fmt: skip
    outputs: list[TensorSpec] = []
    places: list[Any] = []
    for spec in given.outputs:
        made = list(_specs(spec, heads.get(spec.name)))
        places.append(_place(made, len(outputs)))
        outputs += made
    taken = [spec.name for spec in outputs] + list(given.input_names)
    if twice := next((name for name in taken if taken.count(name) > 1), None):
        raise ProjectError(
            f"the head would give a second '{twice}'", where="key 'outputs'", todo="rename the model's output"
        )
    structure = _replaced(given.output_structure, places)
    return dataclasses.replace(given, outputs=tuple(outputs), output_structure=structure)


def _specs(spec: TensorSpec, head: Output | None) -> Iterator[TensorSpec]:
    if head is None:
        yield spec
        return
    where, rank = f"key 'outputs.{spec.name}'", len(spec.shape)
    if not spec.dtype.startswith("float"):
        raise ProjectError(f"the output '{spec.name}' is {spec.dtype}", where=where, todo="a head takes floats")
    if not -rank <= head.axis < rank:
        raise ProjectError(
            f"the output '{spec.name}' has the shape {list(spec.shape)}, and no axis {head.axis}", where=where,
            todo="write the axis of the classes, as in axis: 1",
        )  # fmt: skip
    axis = head.axis % rank
    before, classes, after = spec.shape[:axis], spec.shape[axis], spec.shape[axis + 1 :]
    if head.head == "softmax":
        yield spec
    elif head.head == "argmax":
        yield TensorSpec(name=spec.name, dtype="int32", shape=(*before, *after))
    else:
        if isinstance(classes, int) and head.k > classes:
            raise ProjectError(f"the output '{spec.name}' has {classes} classes", where=where, todo="write a smaller k")
        for name, dtype in zip(names(spec.name, head), (spec.dtype, "int32"), strict=True):
            yield TensorSpec(name=name, dtype=dtype, shape=(*before, head.k, *after))


def _place(made: list[TensorSpec], first: int) -> dict[str, Any]:
    if len(made) == 1:
        return {"kind": "tensor", "index": first}
    items = {"values": {"kind": "tensor", "index": first}, "indices": {"kind": "tensor", "index": first + 1}}
    return {"kind": "dict", "items": items, "order": ["values", "indices"]}


def _replaced(node: Any, places: list[Any]) -> Any:
    """The structure with `places[i]` where its tensor i was."""
    if node is None or node["kind"] == "tensor":
        return None if node is None else places[node["index"]]
    items = node.get("items")
    if isinstance(items, dict):
        return {**node, "items": {key: _replaced(item, places) for key, item in items.items()}}
    return {**node, "items": [_replaced(item, places) for item in items]} if items is not None else node


def decisions(given: Signature, heads: Heads) -> dict[str, int | None]:
    """The outputs that are choices of classes -> the axis along which their order does not count, or None."""
    ranks = {spec.name: len(spec.shape) for spec in given.outputs}
    found: dict[str, int | None] = {}
    for name, head in heads.items():
        if head.head != "softmax":
            chosen = names(name, head)[-1]
            found[chosen] = head.axis % ranks[chosen] if head.head == "topk" else None
    return found


def calls(reference: tuple[Call, ...], heads: Heads) -> tuple[Call, ...]:
    """The reference calls with the heads on their outputs."""
    return tuple(Call(call.inputs, answers(call.outputs, heads)) for call in reference)


def on_graph(program: ExportedGraph, heads: Heads) -> GraphModule:
    """The program's graph with the heads as its last operators."""
    module = graph.shared(program.module)
    output = module.graph.output_node()
    given: list[Node] = []
    for name, node in zip(program.signature.output_names, output.args[0], strict=True):
        given += _nodes(module, node, heads[name]) if name in heads else [node]
    output.args = (tuple(given),)
    tell_outputs(module)
    module.recompile()
    return module


def _nodes(module: GraphModule, node: Node, head: Output) -> list[Node]:
    output = module.graph.output_node()
    if head.head == "softmax":
        return [call(output, _aten.softmax.int, node, head.axis)]
    if head.head == "argmax":
        return [call(output, _aten.to.dtype, call(output, _aten.argmax.default, node, head.axis), torch.int32)]
    pair = call(output, _aten.topk.default, node, head.k, head.axis)
    indices = call(output, operator.getitem, pair, 1)
    return [call(output, operator.getitem, pair, 0), call(output, _aten.to.dtype, indices, torch.int32)]


def source(program_outputs: tuple[str, ...], heads: Heads) -> list[str]:
    """A line of TorchScript for each artifact's output, over the model's outputs `y0`, `y1`, ..."""
    found = []
    for i, name in enumerate(program_outputs):
        head = heads.get(name)
        if head is None:
            found.append(f"y{i}")
        elif head.head == "softmax":
            found.append(f"torch.softmax(y{i}, {head.axis})")
        elif head.head == "argmax":
            found.append(f"torch.argmax(y{i}, {head.axis}).to(torch.int32)")
        else:
            top = f"torch.topk(y{i}, {head.k}, {head.axis})"
            found += [f"{top}[0]", f"{top}[1].to(torch.int32)"]
    return found
