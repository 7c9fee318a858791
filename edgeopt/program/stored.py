"""Tensors that a graph holds, and their names: read, added, taken away."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node


def is_stored(module: GraphModule, node: object) -> bool:
    """Whether `node` reads a tensor of the module."""
    return tensor_of(module, node) is not None


def tensor_of(module: GraphModule, node: object) -> torch.Tensor | None:
    """The tensor that a get_attr node reads, without gradient; None for any other node."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value: object = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value.detach() if isinstance(value, torch.Tensor) else None


def tensor(module: GraphModule, node: Node) -> torch.Tensor:
    """The tensor that a get_attr node is known to read, without gradient."""
    value = tensor_of(module, node)
    assert value is not None, f"{node} reads no tensor"
    return value


def add_tensor(module: GraphModule, name: str, value: torch.Tensor, before: Node, *, trained: bool = False) -> Node:
    """A node before `before` that reads `value`, held under `name` or that name numbered.

    `trained` makes it a parameter, which fine-tuning moves; else it is a buffer.
    Modules that `name` goes through are made where the graph has none, so that the model's own names can be kept.
    """
    path, _, leaf = name.rpartition(".")
    owner = _owner(module, path)
    number, free = 1, leaf
    while hasattr(owner, free):
        free, number = f"{leaf}_{number}", number + 1
    if trained:
        owner.register_parameter(free, torch.nn.Parameter(value))
    else:
        owner.register_buffer(free, value)
    with before.graph.inserting_before(before):
        node = before.graph.get_attr(f"{path}.{free}" if path else free)
    node.meta["val"] = fake(before.graph, value)
    return node


def users(module: GraphModule, name: str) -> set[Node]:
    """What reads the tensor of that name."""
    return {user for n in module.graph.nodes if n.op == "get_attr" and n.target == name for user in n.users}


def remove(module: GraphModule, name: str) -> None:
    """Take the tensor of that name away."""
    path, _, leaf = name.rpartition(".")
    delattr(module.get_submodule(path), leaf)


def fake(graph: Graph, value: torch.Tensor) -> torch.Tensor:
    """`value` without data, of the graph's fake mode, as every node of an exported graph carries."""
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.from_tensor(value, static_shapes=True)
    return value


def _owner(module: torch.nn.Module, path: str) -> torch.nn.Module:
    for part in filter(None, path.split(".")):
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    return module
