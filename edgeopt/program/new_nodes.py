"""A new node of an exported graph with the shape and dtype of its result, as every node there carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node


def call(before: Node, target: Callable[..., Any], *args: Any) -> Node:
    """A node before `before` that calls `target`; it is run on the fake tensors of its arguments."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    fakes = torch.fx.map_arg(args, lambda n: n.meta["val"])
    leaves = torch.utils._pytree.tree_leaves(fakes)
    mode = next((found for leaf in leaves if (found := getattr(leaf, "fake_mode", None)) is not None), None)
    if mode is None:
        node.meta["val"] = target(*fakes)
    else:
        with mode, torch.no_grad():
            node.meta["val"] = target(*fakes)
    return node
