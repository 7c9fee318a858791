"""Literal devices in a TorchScript graph: captured on a CPU, `device=x.device` is written down as 'cpu' (case C08).

Such a file fails where its inputs lie on a GPU. Here every operator that makes or moves a tensor takes the device of
the program's first input instead; constants follow by torch.jit.load's map_location.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# (operator, argument) that torch demands on the CPU whatever the device of the rest: what feeds them stays there
_NEEDS_CPU = {("aten::_pack_padded_sequence", 1), ("aten::tensor_split", 1)}


def follow_inputs(graph: torch._C.Graph) -> None:
    """Replace each literal device, and each one left to torch's default, by that of the first tensor input.

    `graph` is an inlined graph that has not run yet; it is changed in place.
    """
    places = [(node, i) for node in _nodes(graph) for i in _literal(node)]
    for node in [n for n in _nodes(graph) if n.kind() == "aten::cpu" and not _for_cpu_only(n)]:
        node.output().replaceAllUsesWith(node.inputsAt(0))
        node.destroy()
    if not places:
        return
    first = next(value for value in graph.inputs() if isinstance(value.type(), torch._C.TensorType))
    device = graph.create("prim::device", [first], 1)
    graph.prependNode(device)
    device.output().setType(torch._C.DeviceObjType.get())
    for node, i in places:
        node.replaceInput(i, device.output())


def literals(graph: torch._C.Graph) -> list[str]:
    """What `follow_inputs` replaces, each as the operator and, where it is known, the user's file and line."""
    found = [node for node in _nodes(graph) if _literal(node) or node.kind() == "aten::cpu" and not _for_cpu_only(node)]
    return [f"{node.kind()}{_at(node)}" for node in found]


def _nodes(block: Any) -> Iterator[torch._C.Node]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _literal(node: torch._C.Node) -> list[int]:
    """The arguments of an operator that gives tensors which fix its device."""
    schema = _schema(node)
    if schema is None or not any("Tensor" in str(r.type) for r in schema.returns) or _for_cpu_only(node):
        return []
    makes = not any("Tensor" in str(a.type) for a in schema.arguments)  # else it follows its tensors
    return [
        i
        for i, (argument, value) in enumerate(zip(schema.arguments, node.inputs(), strict=True))
        if argument.name == "device" and (_is_fixed(value) or makes and isinstance(value.type(), torch._C.NoneType))
    ]


def _schema(node: torch._C.Node) -> Any:
    text = node.schema()
    return torch._C.parse_schema(text) if text != "(no schema)" else None


def _is_fixed(value: torch._C.Value) -> bool:
    return isinstance(value.type(), torch._C.DeviceObjType) and value.node().kind() != "prim::device"


def _for_cpu_only(node: torch._C.Node) -> bool:
    """Whether everything that reads the node's one output needs it on the CPU."""
    return node.outputsSize() == 1 and _needed_on_cpu(node.output())


def _needed_on_cpu(value: torch._C.Value) -> bool:
    return bool(value.uses()) and all(_needs_cpu(use.user, use.offset) for use in value.uses())


def _needs_cpu(node: torch._C.Node, argument: int) -> bool:
    if node.kind() == "aten::to":
        return _needed_on_cpu(node.output())
    if node.kind() == "aten::sort":  # pack_padded_sequence sorts the lengths, and moves the order to where x is
        return _needed_on_cpu(node.outputsAt(0)) and all(_moves(use.user) for use in node.outputsAt(1).uses())
    return (node.kind(), argument) in _NEEDS_CPU


def _moves(node: torch._C.Node) -> bool:
    return node.kind() == "aten::to" and any(isinstance(v.type(), torch._C.DeviceObjType) for v in node.inputs())


def _at(node: torch._C.Node) -> str:
    lines = [line.strip() for line in node.sourceRange().splitlines() if ".py" in line]
    return f" ({lines[0]})" if lines else ""
