"""Whether an attention mask leaves every query at least one key.

A row whose scores are all -inf is NaN after softmax, and 0 from torch's attention operator (2.5 and later): the two
are only the same thing where no row is masked wholly. It is known of constants, of triangles (a causal mask always
leaves the first key), and of masks that add finite numbers.
"""

from __future__ import annotations

import math
import operator
from typing import Literal

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
Meaning = Literal["allowed", "masked", "added"]  # True is a key to look at; True is none; a number for the score
_MOST_ELEMENTS, _DEEPEST = 1 << 22, 12
_OTHER: dict[Meaning, Meaning] = {"allowed": "masked", "masked": "allowed"}
_SAME_ROWS = {
    _aten.to.dtype, _aten.clone.default, _aten.contiguous.default, _aten.detach.default, _aten.alias.default,
    _aten.lift_fresh_copy.default, _aten._to_copy.default, _aten.type_as.default,
}  # fmt: skip
_RESHAPED = {_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.expand.default}
_NOT = {_aten.logical_not.default, _aten.bitwise_not.default}
_MASKED_FILL = {_aten.masked_fill.Scalar, _aten.masked_fill.Tensor}
_WHERE = {_aten.where.self, _aten.where.ScalarSelf, _aten.where.ScalarOther, _aten.where.Scalar}
_SCALED = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor}
_FILLED = {_aten.zeros.default: 0.0, _aten.ones.default: 1.0, _aten.zeros_like.default: 0.0,
           _aten.ones_like.default: 1.0, _aten.new_zeros.default: 0.0, _aten.new_ones.default: 1.0}  # fmt: skip
_FULL = {_aten.full.default, _aten.full_like.default}


def leaves_a_key(
    module: GraphModule, mask: Node, meaning: Meaning, *, first: bool = False, depth: int = _DEEPEST
) -> bool:
    """Whether each row along the last axis of `mask` is known to leave a key; with `first`, the first one."""

    def below(node: object, meaning: Meaning = meaning, first: bool = first) -> bool:
        return isinstance(node, Node) and leaves_a_key(module, node, meaning, first=first, depth=depth - 1)

    if not depth:
        return False
    value = constant(module, mask)
    if value is not None:
        return _left(value, meaning, first)
    target, args = mask.target, mask.args
    if meaning == "added" and is_finite(module, mask):
        return True
    if target in _SAME_ROWS or (target in _RESHAPED and _same_last_axis(mask)):
        return below(args[0])
    if target is _aten.slice.Tensor:
        return below(args[0], first=True) and _begins_at_first(mask)
    if target in _NOT and meaning in _OTHER:
        return below(args[0], _OTHER[meaning])
    if target in (_aten.eq.Scalar, _aten.ne.Scalar) and meaning in _OTHER and args[1] in (0, 1):
        flips = (args[1] == 0) == (target is _aten.eq.Scalar)
        return below(args[0], _OTHER[meaning] if flips else meaning)
    if target is _aten.tril.default and meaning == "allowed":
        return _diagonal(mask) >= 0 and bool(_fill(args[0]))
    if target is _aten.triu.default:
        return meaning in ("masked", "added") and _diagonal(mask) >= 1
    if meaning == "added" and target in _MASKED_FILL:
        return is_finite(module, args[0]) and below(args[1], "masked")
    if meaning == "added" and target in _WHERE:
        if is_finite(module, args[1]):
            return below(args[0], "allowed")
        return is_finite(module, args[2]) and below(args[0], "masked")
    return False


def _left(value: torch.Tensor, meaning: Meaning, first: bool) -> bool:
    keys = value > -math.inf if meaning == "added" else value.bool() == (meaning == "allowed")
    if not keys.dim():
        return bool(keys)
    return bool(keys[..., 0].all() if first else keys.any(-1).all())


def _same_last_axis(node: Node) -> bool:
    after, before = node.meta["val"].shape, node.args[0].meta["val"].shape
    return len(before) > 0 and str(after[-1]) == str(before[-1])


def _begins_at_first(node: Node) -> bool:
    dim = node.args[1] if len(node.args) > 1 else 0
    start = node.args[2] if len(node.args) > 2 else None
    step = node.args[4] if len(node.args) > 4 else 1
    last = dim % len(node.meta["val"].shape) == len(node.meta["val"].shape) - 1
    return not last or (start in (None, 0) and step == 1)


def _diagonal(node: Node) -> int:
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    return diagonal if isinstance(diagonal, int) else -1


def _fill(value: object) -> float | None:
    """The number that every element holds; None where it is not written in the graph."""
    if isinstance(value, bool | int | float):
        return float(value)
    if not isinstance(value, Node):
        return None
    if value.target in _FULL:
        return float(value.args[1]) if isinstance(value.args[1], bool | int | float) else None
    return _FILLED.get(value.target)


def is_finite(module: GraphModule, value: object, depth: int = _DEEPEST) -> bool:
    """Whether a number, or every element of a node, is finite: whatever finite values the program is given.

    An input as it is does not count, for it may hold -inf. Nor does a sum: two of the least numbers overflow.
    """
    if isinstance(value, Node) and depth:
        known = constant(module, value)
        if known is not None:
            return bool(torch.isfinite(known).all())
        if _fill(value) is not None:
            return math.isfinite(_fill(value))
        if value.target in _SCALED:
            return _is_zero_or_one(value.args[0], value.args[1]) and is_finite(module, value.args[1], depth - 1)
        if value.target in _MASKED_FILL:
            return all(is_finite(module, part, depth - 1) for part in (value.args[0], value.args[2]))
        if value.target in _WHERE:
            return all(is_finite(module, part, depth - 1) for part in value.args[1:])
        if value.target in _SAME_ROWS | _RESHAPED | {_aten.slice.Tensor}:
            source = value.args[0].meta["val"].dtype
            return not source.is_floating_point or is_finite(module, value.args[0], depth - 1)
        return False
    return isinstance(value, bool | int | float) and math.isfinite(value)


_LARGE = 1e3  # what a mask of zeros and ones is multiplied by to keep keys out
_OF_A_MASK = {_aten.rsub.Scalar, _aten.sub.Tensor} | _SAME_ROWS | _RESHAPED | {_aten.slice.Tensor}


def _is_zero_or_one(node: object, factor: object) -> bool:
    """Whether a node is an input, or one minus it, that only makes sense as zeros and ones: it is scaled up."""
    while isinstance(node, Node) and node.target in _OF_A_MASK:
        if node.meta["val"].dtype in (torch.bool, torch.int64, torch.int32):
            return True
        node = node.args[0]
    if not isinstance(node, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    whole = not node.meta["val"].dtype.is_floating_point
    return whole or (node.op == "placeholder" and isinstance(factor, int | float) and abs(factor) >= _LARGE)


def constant(module: GraphModule, node: Node, depth: int = _DEEPEST) -> torch.Tensor | None:
    """The value of a node that depends on stored tensors and numbers alone, up to a size; None else."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not depth or not all(isinstance(size, int) for size in value.shape):
        return None
    if math.prod(value.shape) > _MOST_ELEMENTS:
        return None
    if node.op == "get_attr":
        return _stored(module, node)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    sources = {source: constant(module, source, depth - 1) for source in node.all_input_nodes}
    if any(found is None for found in sources.values()):
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), sources.__getitem__)
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _stored(module: GraphModule, node: Node) -> torch.Tensor | None:
    value = operator.attrgetter(node.target)(module)
    written = any(getattr(getattr(u.target, "_schema", None), "is_mutable", False) for u in node.users)
    return value.detach() if isinstance(value, torch.Tensor) and not written else None
