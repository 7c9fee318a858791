"""New nodes with what every node of an exported graph carries: the shape and dtype of its result, and its origin."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

_ORIGIN = ("nn_module_stack", "source_fn_stack", "stack_trace", "torch_fn", "from_node")


def call(before: Node, target: Any, args: tuple, kwargs: dict[str, Any] | None = None, *, like: Node) -> Node:
    """A node before `before` that calls `target` ('getitem' for an item), its origin that of `like`.

    The operator is run on the fake tensors of its arguments, so that dynamic sizes stay expressions.
    """
    target = operator.getitem if target == "getitem" else target
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs or {})
    node.meta = {key: like.meta[key] for key in _ORIGIN if key in like.meta}
    node.meta["val"] = result(target, args, kwargs or {})
    return node


def result(target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `target` gives for the fake values of nodes among its arguments."""
    fakes = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = mode_of(fakes)
    if mode is None:
        return target(*fakes[0], **fakes[1])
    with mode, torch.no_grad():
        return target(*fakes[0], **fakes[1])


def mode_of(values: Any) -> Any:
    """The fake mode of the first fake tensor in nested `values`, or None."""
    for leaf in torch.utils._pytree.tree_leaves(values):
        mode = getattr(leaf, "fake_mode", None)
        if mode is not None:
            return mode
    return None
