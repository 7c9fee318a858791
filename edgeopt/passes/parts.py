"""Parts of a tensor put together again in their order, and padding that is cut off again."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from edgeopt.passes.layers import argument
from edgeopt.passes.scalars import axis, sizes

_aten = torch.ops.aten
_END = 2**63 - 1
CAT = {_aten.cat.default, _aten.concat.default, _aten.concatenate.default}
SPLIT = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.tensor_split.sections}


def joined(node: Node) -> Node | None:
    """The tensor whose parts, all of them and in their order, `node` concatenates or stacks."""
    if node.target in CAT:
        parts, dim = node.args[0], axis(node, argument(node, "dim"))
        return _of_split(parts, SPLIT, dim) or _of_slices(parts, dim)
    if node.target is _aten.stack.default:
        return _of_split(node.args[0], {_aten.unbind.int}, axis(node, argument(node, "dim")))
    return None


def _of_split(parts: list[Node], splits: set, dim: int) -> Node | None:
    split = parts[0].args[0] if parts[0].target is operator.getitem else None
    if not isinstance(split, Node) or split.target not in splits or len(split.meta["val"]) != len(parts):
        return None
    source = split.args[0]
    if axis(source, argument(split, "dim")) != dim:
        return None
    in_order = all(p.target is operator.getitem and p.args == (split, i) for i, p in enumerate(parts))
    return source if in_order else None


def _of_slices(parts: list[Node], dim: int) -> Node | None:
    """For slices [0:a], [a:b], [b:] along `dim` of one tensor, with fixed bounds."""
    source, at = parts[0].args[0] if parts[0].args else None, 0
    if not isinstance(source, Node) or sizes(source) is None or not sizes(source)[dim].isdigit():
        return None
    size = int(sizes(source)[dim])
    for part in parts:
        bounds = _bounds(part, dim, size) if part.args and part.args[0] is source else None
        if bounds is None or bounds[0] != at:
            return None
        at = bounds[1]
    return source if at == size else None


def _bounds(node: Node, dim: int, size: int) -> tuple[int, int] | None:
    """Where a slice of step 1 along `dim` of `size` elements begins and ends; None for any other node."""
    if node.target is not _aten.slice.Tensor or argument(node, "step") != 1:
        return None
    start, end = argument(node, "start") or 0, argument(node, "end")
    end = _END if end is None else end
    if axis(node, argument(node, "dim")) != dim or not isinstance(start, int) or not isinstance(end, int):
        return None
    return tuple(min(bound if bound >= 0 else max(0, bound + size), size) for bound in (start, end))


def unpadded(node: Node) -> Node | None:
    """The tensor that is padded first, where `node` takes the very padding off again."""
    inner = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    amounts = _padding(inner)
    if amounts is None or any(amount < 0 for amount in amounts):
        return None
    if (off := _padding(node)) is not None:
        longest = max(len(off), len(amounts))
        undone = [-amount for amount in amounts] + [0] * (longest - len(amounts))
        return inner.args[0] if off + [0] * (longest - len(off)) == undone else None
    return _sliced_off(node, inner, amounts)


def _padding(node: Node | None) -> list[int] | None:
    if node is None or node.target not in (_aten.pad.default, _aten.constant_pad_nd.default):
        return None
    return list(node.args[1]) if all(isinstance(amount, int) for amount in node.args[1]) else None


def _sliced_off(node: Node, pad: Node, amounts: list[int]) -> Node | None:
    padded = [i for i in range(0, len(amounts), 2) if amounts[i] or amounts[i + 1]]
    if node.target is not _aten.slice.Tensor or len(padded) != 1 or argument(node, "step") != 1:
        return None
    dim = len(sizes(node)) - 1 - padded[0] // 2  # pad names the last dimension first
    before, after = amounts[padded[0] : padded[0] + 2]
    if axis(node, argument(node, "dim")) != dim or (argument(node, "start") or 0) != before:
        return None
    end, size = argument(node, "end"), sizes(pad.args[0])[dim]
    whole = end in (None, _END) if after == 0 else end == -after
    fixed = isinstance(end, int) and size.isdigit() and end == before + int(size)
    return pad.args[0] if whole or fixed else None
