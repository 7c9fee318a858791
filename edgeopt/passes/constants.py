"""Tensors that a graph holds: reading, adding and replacing them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node


def tensor_of(module: GraphModule, node: Node | None) -> torch.Tensor | None:
    """The tensor that a get_attr node reads, without gradient; None for any other node."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = module
    for part in node.target.split("."):
        value = getattr(value, part)
    return value.detach() if isinstance(value, torch.Tensor) else None


def add_tensor(module: GraphModule, name: str, value: torch.Tensor, before: Node, *, trained: bool) -> Node:
    """A get_attr node before `before` that reads `value`, held under `name` or that name numbered.

    `trained` makes it a parameter, which fine-tuning moves; else it is a buffer.
    """
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    number, free = 1, leaf
    while hasattr(owner, free):
        free, number = f"{leaf}_{number}", number + 1
    if trained:
        owner.register_parameter(free, torch.nn.Parameter(value))
    else:
        owner.register_buffer(free, value)
    with before.graph.inserting_before(before):
        node = before.graph.get_attr(f"{path}.{free}" if path else free)
    node.meta["val"] = _fake(before.graph, value)
    return node


def _fake(graph: torch.fx.Graph, value: torch.Tensor) -> torch.Tensor:
    """`value` without data, of the graph's fake mode, as every other node of an exported graph carries."""
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.from_tensor(value, static_shapes=True)
    return value
