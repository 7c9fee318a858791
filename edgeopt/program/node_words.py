"""A node in words that stay the same where the graph does: its operator, and the module that it belongs to."""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.program import nodes, parts

# Namespaces whose operators are known to be no contraction where torch's counter does not count them.
KNOWN = {"aten", "prim", "prims", "quantized_decomposed", "torchao", "_operator", "higher_order"}
_FOLLOWED = 4  # operators back from one that does not say its module


def operator_name(node: Node) -> str:
    """The operator that a node calls, with its namespace where that is not torch's own."""
    target = node.target
    if parts.part_of(node) is not None:
        return "part"
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
        return name if target.namespace in KNOWN else f"{target.namespace}.{name}"
    return "module" if node.op == "call_module" else str(getattr(target, "__name__", target))


def is_known(node: Node) -> bool:
    """Whether an operator that the counter does not count is known to be no contraction."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in KNOWN
    return node.op != "call_module"


def path_of(node: Node) -> str:
    """The module that the operator belongs to; for one that does not say, as Q and DQ, that of what it reads."""
    for _ in range(_FOLLOWED):
        path = _own_path(node)
        given = [n for n in node.all_input_nodes if n.op in ("call_function", "call_module")]
        if path or "nn_module_stack" in node.meta or not given:
            return path
        node = given[0]
    return ""


def _own_path(node: Node) -> str:
    part = parts.part_of(node)
    path = part.label if part else node.target if node.op == "call_module" else nodes.module_path(node)
    stored = [n.target.rpartition(".")[0] for n in node.all_input_nodes if n.op == "get_attr"]
    return path or next((name for name in stored if name), "")


def is_item(node: Node) -> bool:
    """Whether the node takes one of the results of another."""
    return getattr(node.target, "__name__", "") == "getitem"
