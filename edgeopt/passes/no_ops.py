"""Operators that give their input back: dropout in eval mode, detach, casts to the same dtype, full slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from edgeopt.passes.changed import Changed, Context

_aten = torch.ops.aten
_END = 2**63 - 1


def run(context: Context) -> Changed:
    module, count = context.module, 0
    for node in list(module.graph.nodes):
        if _is_export_check(node):
            module.graph.erase_node(node)
        elif node.op == "call_function" and _RULES.get(node.target, _never)(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        else:
            continue
        count += 1
    return Changed(count)


def _is_export_check(node: Node) -> bool:
    """What torch.export adds to check its own assumptions; the guard of capture has checked the program."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[2].startswith("_guards") and not node.users
    return node.target is _aten._assert_tensor_metadata.default


def _never(node: Node) -> bool:
    return False


def _always(node: Node) -> bool:
    return True


def _inactive(node: Node) -> bool:
    p, training = node.args[1:3]
    return not training or p == 0


def _same_dtype(node: Node) -> bool:
    """For `to`: nothing to convert, no other layout, and no copy asked for."""
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if source is None or result is None or source.dtype != result.dtype or source.device != result.device:
        return False
    copies = node.kwargs.get("copy", node.args[3] if len(node.args) > 3 else False)
    return not copies and node.kwargs.get("memory_format") in (None, torch.preserve_format)


def _same_sizes(node: Node) -> bool:
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if source is None or result is None:
        return False
    # symbols are compared by text: comparing them by value would add a guard to the graph's shape environment
    return [str(size) for size in source.shape] == [str(size) for size in result.shape]


def _whole(node: Node) -> bool:
    start, end, step = (*node.args[2:5], *(None, None, 1)[len(node.args[2:5]) :])
    return start in (None, 0) and end in (None, _END) and step == 1


_RULES: dict[object, Callable[[Node], bool]] = {
    _aten.detach.default: _always,
    _aten.alias.default: _always,
    _aten.dropout.default: _inactive,
    _aten.feature_dropout.default: _inactive,
    _aten.alpha_dropout.default: _inactive,
    _aten.feature_alpha_dropout.default: _inactive,
    _aten.to.dtype: _same_dtype,
    _aten.type_as.default: _same_dtype,
    _aten.expand.default: _same_sizes,
    _aten.view.default: _same_sizes,
    _aten.reshape.default: _same_sizes,
    _aten.slice.Tensor: _whole,
}
