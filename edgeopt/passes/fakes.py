"""New nodes with what every node of an exported graph carries: the shape and dtype of its result, and its origin."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from edgeopt.program.fakes import result

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
