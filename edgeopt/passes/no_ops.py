"""Operators that give their input back: dropout in eval mode, detach, casts to the same dtype, full slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from edgeopt.passes.changed import Changed
from edgeopt.spec.profile import Profile

_aten = torch.ops.aten
_END = 2**63 - 1


def run(module: GraphModule, profile: Profile) -> Changed:
    del profile
    count, declined = 0, []
    for node in list(module.graph.nodes):
        if _is_export_check(node):
            module.graph.erase_node(node)
            count += 1
            continue
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        reason = rule(node)
        if reason:
            declined.append(f"{node.name}: {reason}")
        else:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            count += 1
    return Changed(count, tuple(declined))


def _is_export_check(node: Node) -> bool:
    """What torch.export adds to check its own assumptions; the guard of capture has checked the program."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[2].startswith("_guards") and not node.users
    return node.target is _aten._assert_tensor_metadata.default


def _always(node: Node) -> str | None:
    return None


def _dropout(node: Node) -> str | None:
    p, training = node.args[1], node.args[2]
    return "it is active, as the user's code asks" if training and p > 0 else None


def _same_dtype(node: Node) -> str | None:
    """For `to`: nothing to convert, and no copy asked for."""
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if source is None or result is None or source.dtype != result.dtype or source.device != result.device:
        return "it converts"
    copies = node.kwargs.get("copy", node.args[3] if len(node.args) > 3 else False)
    layout = node.kwargs.get("memory_format")
    return "it copies" if copies or layout not in (None, torch.preserve_format) else None


def _same_sizes(node: Node) -> str | None:
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if source is None or result is None or len(source.shape) != len(result.shape):
        return "it changes the shape"
    # symbols are compared by text: comparing them by value would add a guard to the graph's shape environment
    return None if [str(s) for s in source.shape] == [str(s) for s in result.shape] else "it changes the shape"


def _whole_slice(node: Node) -> str | None:
    start = node.args[2] if len(node.args) > 2 else None
    end = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return None if start in (None, 0) and end in (None, _END) and step == 1 else "it cuts"


_RULES: dict[object, Callable[[Node], str | None]] = {
    _aten.detach.default: _always,
    _aten.alias.default: _always,
    _aten.dropout.default: _dropout,
    _aten.feature_dropout.default: _dropout,
    _aten.alpha_dropout.default: _dropout,
    _aten.feature_alpha_dropout.default: _dropout,
    _aten.to.dtype: _same_dtype,
    _aten.type_as.default: _same_dtype,
    _aten.expand.default: _same_sizes,
    _aten.view.default: _same_sizes,
    _aten.reshape.default: _same_sizes,
    _aten.slice.Tensor: _whole_slice,
}
