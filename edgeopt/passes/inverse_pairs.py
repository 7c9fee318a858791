"""Operators that undo each other: permutations, reshapes, casts, copies, parts put together again, pad and slice.

A chain of permutations is one permutation, of reshapes the last one, and a cast after one that loses nothing is a
cast of what stood before. A copy goes where nobody writes and nobody takes a view that needs its strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from edgeopt.passes import permutations, rewrite
from edgeopt.passes.casts import is_cast, lossless
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.ownership import handed_out
from edgeopt.passes.parts import joined, unpadded
from edgeopt.passes.rewrite import Rule
from edgeopt.passes.scalars import dtype, dtype_name, sizes, value_of
from edgeopt.passes.views import views_below

_aten = torch.ops.aten


def run(context: Context) -> Changed:
    return rewrite.apply(context, _RULES)


# permutations


@dataclass(frozen=True)
class _Permuted:
    source: Node
    order: tuple[int, ...]
    inner: Node | None


def _find_permuted(context: Context, node: Node) -> _Permuted | None:
    order = permutations.of(node)
    if order is None:
        return None
    if order == tuple(range(len(order))):
        return _Permuted(node.args[0], order, None)
    inner = node.args[0]
    first = permutations.of(inner)
    return _Permuted(inner.args[0], permutations.composed(first, order), inner) if first else None


def _reason_against_permuted(context: Context, node: Node, found: _Permuted) -> str | None:
    identity = found.order == tuple(range(len(found.order)))
    if found.inner is not None and len(found.inner.users) > 1 and not identity:
        return f"{found.inner.name} is used elsewhere"
    return context.writes(node, found.source)


def _permuted(context: Context, node: Node, found: _Permuted) -> Node:
    if found.order == tuple(range(len(found.order))):
        return found.source
    target, rest = permutations.operator(found.order)
    return call(node, target, (found.source, *rest), like=node)


# reshapes

_BY_SHAPE = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_RESHAPES = _BY_SHAPE | {
    _aten.flatten.using_ints, _aten.unflatten.int, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
    _aten.unsqueeze.default,
}  # fmt: skip


@dataclass(frozen=True)
class _Reshaped:
    """The node gives the elements of `source` in their order; `shape` is what reshape takes, None where unknown."""

    source: Node
    inner: Node
    shape: tuple[Any, ...] | None


def _find_reshaped(context: Context, node: Node) -> _Reshaped | None:
    inner = node.args[0] if node.args else None
    if node.target not in _RESHAPES or not isinstance(inner, Node) or inner.target not in _RESHAPES:
        return None
    return _Reshaped(inner.args[0], inner, _shape(node))


def _shape(node: Node) -> tuple[Any, ...] | None:
    """The sizes of the result as reshape takes them: as the node writes them, else numbers and at most one -1."""
    if node.target in _BY_SHAPE:
        return tuple(node.args[1])
    found = [int(size) if size.isdigit() else -1 for size in sizes(node)]
    return tuple(found) if found.count(-1) < 2 and 0 not in found else None


def _reason_against_reshaped(context: Context, node: Node, found: _Reshaped) -> str | None:
    if sizes(node) != sizes(found.source):
        if len(found.inner.users) > 1:
            return f"{found.inner.name} is used elsewhere"
        if found.shape is None:
            return "two of its sizes are dynamic, and it does not name them"
    return context.writes(node, found.source)


def _reshaped(context: Context, node: Node, found: _Reshaped) -> Node:
    if sizes(node) == sizes(found.source):
        return found.source
    new = call(node, _aten.reshape.default, (found.source, list(found.shape)), like=node)
    new.meta["val"] = node.meta["val"]  # -1 would give a size of its own
    return new


# casts


@dataclass(frozen=True)
class _Recast:
    source: Node
    inner: Node


def _find_recast(context: Context, node: Node) -> _Recast | None:
    if not is_cast(node) or not is_cast(node.args[0]):
        return None
    inner = node.args[0]
    returns = dtype(node) == dtype(inner.args[0])
    return _Recast(inner.args[0], inner) if returns or lossless(dtype(inner.args[0]), dtype(inner)) else None


def _reason_against_recast(context: Context, node: Node, found: _Recast) -> str | None:
    before, between = dtype(found.source), dtype(found.inner)
    if not lossless(before, between):
        return f"{dtype_name(between)} does not hold every {dtype_name(before)}"
    return (before == dtype(node) and handed_out(node, found.source)) or context.writes(node, found.source)


def _recast(context: Context, node: Node, found: _Recast) -> Node:
    if dtype(node) == dtype(found.source):
        return found.source
    return call(node, _aten.to.dtype, (found.source, dtype(node)), like=node)


# copies

_COPIES = {_aten.contiguous.default, _aten.clone.default, _aten.lift_fresh_copy.default}
_RETYPED = (_aten.as_strided.default, _aten.view.dtype, _aten.view_as_complex.default, _aten.view_as_real.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def _find_copy(context: Context, node: Node) -> Node | None:
    return node.args[0] if node.target in _COPIES and isinstance(node.args[0], Node) else None


def _reason_against_copy(context: Context, node: Node, source: Node) -> str | None:
    if reason := context.writes(node, source):
        return reason
    wanted = node.kwargs.get("memory_format")
    if wanted not in (None, torch.contiguous_format, torch.preserve_format):
        return f"it asks for {dtype_name(wanted)}"
    if reason := handed_out(node, source):
        return reason
    if _same_strides(node, source):
        return None
    below = views_below(node)
    needy = next((view for view in below if view.target in _RETYPED), None)
    if needy is None:
        needy = next((v for v in below if v.target in _VIEWS and v.args[0] is not node), None)
    return f"{needy.name} may need its strides" if needy is not None else None


def _same_strides(node: Node, source: Node) -> bool:
    after, before = value_of(node), value_of(source)
    return before is not None and [str(s) for s in before.stride()] == [str(s) for s in after.stride()]


def _original(context: Context, node: Node, source: Node) -> Node:
    for user in list(node.users):  # a view of what is not contiguous is an error, a reshape copies
        if user.target in _VIEWS:
            user.target = _aten.reshape.default
    return source


# parts put together again, and what is padded and cut off again (parts.py)


def _find_joined(context: Context, node: Node) -> Node | None:
    return joined(node)


def _find_unpadded(context: Context, node: Node) -> Node | None:
    return unpadded(node)


def _reason_against_source(context: Context, node: Node, source: Node) -> str | None:
    if sizes(source) != sizes(node) or dtype(source) != dtype(node):
        return "the parts are not the whole"
    return handed_out(node, source) or context.writes(node, source)


def _source(context: Context, node: Node, source: Node) -> Node:
    return source


_RULES = (
    Rule("permutations", _find_permuted, _reason_against_permuted, _permuted),
    Rule("reshapes", _find_reshaped, _reason_against_reshaped, _reshaped),
    Rule("casts", _find_recast, _reason_against_recast, _recast),
    Rule("copies", _find_copy, _reason_against_copy, _original),
    Rule("parts", _find_joined, _reason_against_source, _source),
    Rule("padding", _find_unpadded, _reason_against_source, _source),
    Rule("flips", lambda context, node: _flipped(node), _reason_against_source, _source),
)


def _flipped(node: Node) -> Node | None:
    inner = node.args[0] if node.target is _aten.flip.default else None
    if not isinstance(inner, Node) or inner.target is not _aten.flip.default:
        return None
    rank = len(sizes(node))
    same = {d % rank for d in node.args[1]} == {d % rank for d in inner.args[1]}
    return inner.args[0] if same else None
