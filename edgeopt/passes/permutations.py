"""Operators that reorder a tensor's axes, as permutations: transpose, permute, t, mT, swapaxes, movedim."""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes.scalars import sizes

_aten = torch.ops.aten
_SWAPS = {
    _aten.transpose.int, _aten.swapaxes.default, _aten.swapdims.default,
}  # fmt: skip
_LAST_TWO = {_aten.mT.default, _aten.t.default}
_REVERSED = {_aten.numpy_T.default}
_MOVES = {_aten.movedim.int, _aten.moveaxis.int, _aten.movedim.intlist, _aten.moveaxis.intlist}


def of(node: object) -> tuple[int, ...] | None:
    """The permutation p of `node`: axis i of its result is axis p[i] of its operand. None for any other operator."""
    if not isinstance(node, Node) or node.op != "call_function" or sizes(node) is None:
        return None
    rank, target = len(sizes(node)), node.target
    if target is _aten.permute.default:
        return tuple(dim % rank for dim in node.args[1])
    if target in _SWAPS:
        return swapped(range(rank), node.args[1] % max(1, rank), node.args[2] % max(1, rank))
    if target in _LAST_TWO:
        return swapped(range(rank), -2, -1) if rank > 1 else tuple(range(rank))
    if target in _REVERSED:
        return tuple(reversed(range(rank)))
    return _moved(node, rank) if target in _MOVES else None


def swapped(order: range | tuple[int, ...], a: int, b: int) -> tuple[int, ...]:
    changed = list(order)
    if changed:
        changed[a], changed[b] = changed[b], changed[a]
    return tuple(changed)


def _moved(node: Node, rank: int) -> tuple[int, ...]:
    sources, targets = ([dims] if isinstance(dims, int) else dims for dims in node.args[1:3])
    placed = {t % rank: s % rank for s, t in zip(sources, targets, strict=True)}
    rest = iter(dim for dim in range(rank) if dim not in placed.values())
    return tuple(placed[dim] if dim in placed else next(rest) for dim in range(rank))


def composed(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation of `second` after `first`."""
    return tuple(first[dim] for dim in second)


def operator(order: tuple[int, ...]) -> tuple[torch._ops.OpOverload, tuple]:
    """The operator and its arguments after the operand: a transpose where two axes change places."""
    moved = [i for i, dim in enumerate(order) if i != dim]
    if len(moved) == 2:
        return _aten.transpose.int, tuple(moved)
    return _aten.permute.default, (list(order),)
