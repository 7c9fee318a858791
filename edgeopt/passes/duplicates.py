"""Equal operators on equal inputs, computed once (common subexpressions).

torch's CSEPass does not see in-place writes and takes 1, 1.0 and True for one value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from edgeopt.passes.changed import Changed, Context
from edgeopt.program.qdq import is_dequantize


def run(context: Context) -> Changed:
    module, mutated = context.module, context.mutated
    first: dict[Any, Node] = {}
    count = 0
    for node in list(module.graph.nodes):
        if not _may_merge(node, mutated):
            continue
        earlier = first.setdefault((node.op, str(node.target), _key(node.args), _key(node.kwargs)), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            module.graph.erase_node(node)
            count += node.op == "call_function"
    return Changed(count)


def _may_merge(node: Node, mutated: set[Node]) -> bool:
    if node in mutated or any(source in mutated for source in node.all_input_nodes):
        return False
    if node.op == "get_attr":
        return True
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if is_dequantize(node):
        return False  # runtimes fuse an operator with the dequantize of its own inputs, so each keeps its own
    return not node.is_impure() and torch.Tag.nondeterministic_seeded not in node.target.tags


def _key(value: Any) -> Any:
    """A hashable form of arguments in which 1, 1.0 and True differ."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_key(item) for item in value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    return value if isinstance(value, Node) else (type(value).__name__, repr(value))
