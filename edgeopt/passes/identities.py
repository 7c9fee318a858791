"""Arithmetic that gives its operand back, twice what once does, and chains of numbers that are one number.

Zero times x is no zero where x is NaN or infinite, and x - x no more so; the root of a square is no x. These stay.
-0 and 0 count as one number unless something in the graph tells them apart, as a division does.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from edgeopt.passes import rewrite
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.layers import argument
from edgeopt.passes.ownership import handed_out
from edgeopt.passes.parts import CAT, SPLIT
from edgeopt.passes.rewrite import Rule
from edgeopt.passes.scalars import ADD, DIV, MUL, NEG, SUB, axis, dtype, dtype_name, number, same_type, sizes

_aten = torch.ops.aten
_POW = {_aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor, _aten.float_power.Tensor_Scalar}
_TELL_ZEROS_APART = {
    _aten.reciprocal, _aten.rsqrt, _aten.atan2, _aten.arctan2, _aten.copysign, _aten.signbit, _aten.float_power,
    _aten.div, _aten.true_divide, _aten.divide, _aten.pow,
}  # fmt: skip
_LARGEST_FACTOR = 2.0**40  # of a chain, and one over it the smallest: float32 ends at 2**127 and 2**-126


def run(context: Context) -> Changed:
    teller = next((node for node in context.module.graph.nodes if _tells_zeros_apart(node)), None)
    neutral = Rule("neutral", partial(_find_neutral, teller), _reason_against_same, _same)
    return rewrite.apply(context, (neutral, *_RULES))


@dataclass(frozen=True)
class _Same:
    """The node gives `source` back, but for what `unless` says."""

    source: Node
    unless: str | None = None


# x * 1, x / 1, x + 0, x - 0, x ** 1


def _find_neutral(teller: Node | None, context: Context, node: Node) -> _Same | None:
    if node.op != "call_function" or len(node.args) < 2:
        return None
    x, other = node.args[:2]
    if node.target in MUL | ADD and isinstance(other, Node) and number(context, other) is None:
        x, other = other, x
    if not isinstance(x, Node) or sizes(x) is None:
        return None
    neutral = _NEUTRAL.get(node.target)
    value = None if neutral is None else number(context, other)
    if value is None:
        return None
    if value == neutral and not node.kwargs.get("rounding_mode"):
        return _Same(x, _signed_zero(teller, node, value))
    if value == 0 and node.target in MUL:
        return _Same(x, "a product with 0 is NaN where its operand is NaN or infinite")
    return None


_NEUTRAL = {**dict.fromkeys(MUL | DIV | _POW, 1), **dict.fromkeys(ADD | SUB, 0)}


def _signed_zero(teller: Node | None, node: Node, value: float) -> str | None:
    """x + 0 makes 0 of -0, which x - 0, x + -0 and the rest leave alone."""
    plus = node.target in ADD | SUB and (math.copysign(1, value) > 0) == (node.target in ADD)
    if teller is None or not plus or not dtype(node).is_floating_point:
        return None
    return f"it makes 0 of -0, and {teller.name} may tell the two apart"


def _tells_zeros_apart(node: Node) -> bool:
    if getattr(node.target, "overloadpacket", None) not in _TELL_ZEROS_APART:
        return False
    if node.target in _POW and isinstance(node.args[1], int | float):
        return node.args[1] < 0
    return len(node.args) < 2 or isinstance(node.args[1], Node)


# -(-x), |x| of |x|, relu of relu, and other operators that do nothing the second time

_INVOLUTIONS = {_aten.logical_not.default: torch.bool, _aten.bitwise_not.default: None} | dict.fromkeys(NEG)
_IDEMPOTENT = {
    _aten.abs.default: "abs", _aten.absolute.default: "abs", _aten.floor.default: "floor", _aten.ceil.default: "ceil",
    _aten.trunc.default: "trunc", _aten.fix.default: "trunc", _aten.round.default: "round", _aten.sign.default: "sign",
}  # fmt: skip


def _find_twice(context: Context, node: Node) -> _Same | None:
    inner = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if inner is None or node.op != "call_function":
        return None
    if node.target in _INVOLUTIONS and (inner.target is node.target or {node.target, inner.target} <= NEG):
        wanted = _INVOLUTIONS[node.target]
        source = inner.args[0]
        return _Same(source) if wanted in (None, dtype(source)) else None
    if node.target in _IDEMPOTENT and _IDEMPOTENT.get(inner.target) == _IDEMPOTENT[node.target]:
        return _Same(inner)
    return None


# one tensor concatenated or split, and reductions over axes of one element

_REDUCED = {
    _aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default, _aten.prod.dim_int,
}  # fmt: skip


def _find_single(context: Context, node: Node) -> _Same | None:
    if node.target in CAT and len(node.args[0]) == 1:
        return _Same(node.args[0][0])
    if node.target is operator.getitem and node.args[0].target in SPLIT:
        return _Same(node.args[0].args[0]) if len(node.args[0].meta["val"]) == 1 else None
    if node.target in _REDUCED and _over_single_elements(node):
        return _Same(node.args[0])
    return None


def _over_single_elements(node: Node) -> bool:
    dims, before = argument(node, "dim"), sizes(node.args[0])
    dims = [dims] if isinstance(dims, int) else dims
    return bool(dims) and bool(before) and all(before[axis(node.args[0], dim)] == "1" for dim in dims)


def _reason_against_same(context: Context, node: Node, found: _Same) -> str | None:
    if found.unless:
        return found.unless
    if reason := context.writes(node, found.source) or handed_out(node, found.source):
        return reason
    if dtype(node) != dtype(found.source):
        return f"it makes {dtype_name(dtype(node))} of {dtype_name(dtype(found.source))}"
    if sizes(node) != sizes(found.source) and node.target not in _REDUCED:
        return f"it makes ({', '.join(sizes(node))}) of ({', '.join(sizes(found.source))})"
    return None


def _same(context: Context, node: Node, found: _Same) -> Node:
    if sizes(node) == sizes(found.source):
        return found.source
    dims = argument(node, "dim")  # a reduction that drops its axes
    return call(node, _aten.squeeze.dims, (found.source, [dims] if isinstance(dims, int) else list(dims)), like=node)


# x a b = x (a b), x / a / b, x + a + b


@dataclass(frozen=True)
class _Chain:
    """`node` = source `operator` value, where node and the operator before it have `first` and `second`."""

    source: Node
    inner: Node
    first: float
    second: float
    product: bool


def _find_chain(context: Context, node: Node) -> _Chain | None:
    inner = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    for step, product in ((_factor, True), (_term, False)):
        second = step(context, node)
        first = step(context, inner) if inner is not None and second is not None else None
        if first is not None:
            return _Chain(inner.args[0], inner, first, second, product)
    return None


def _factor(context: Context, node: Node) -> float | None:
    """The number that the node multiplies its first operand by; an integer stays one."""
    if node.target not in MUL | DIV or node.kwargs.get("rounding_mode"):
        return None
    value = number(context, node.args[1])
    if value is None or isinstance(value, bool):
        return None
    if node.target in MUL:
        return value
    return 1 / value if value else None


def _term(context: Context, node: Node) -> float | None:
    if node.target not in ADD | SUB:
        return None
    value = number(context, node.args[1])
    alpha = argument(node, "alpha")
    if value is None or isinstance(value, bool) or not isinstance(alpha, int | float):
        return None
    return value * alpha if node.target in ADD else -value * alpha


def _reason_against_chain(context: Context, node: Node, found: _Chain) -> str | None:
    if len(found.inner.users) > 1:
        return f"{found.inner.name} is used elsewhere"
    if reason := context.writes(node, found.inner, found.source):
        return reason
    if not same_type(node, found.source) or not same_type(found.inner, found.source):
        return "the chain changes dtype or shape on its way"
    kind = dtype(node)
    if not kind.is_floating_point:
        whole = isinstance(found.first, int) and isinstance(found.second, int)
        small = whole and abs(_value(found)) < 2**7
        return None if small else "its integers might wrap or be cut"
    if kind not in (torch.float32, torch.float64):
        return f"{dtype_name(kind)} rounds and overflows between the two"
    if found.product:
        parts = (abs(found.first), abs(found.second), abs(_value(found)))
        near_one = all(1 / _LARGEST_FACTOR <= part <= _LARGEST_FACTOR for part in parts)
        return None if near_one else "its factors may overflow or vanish between the two"
    cancels = (found.first < 0) != (found.second < 0)
    return "its terms cancel, and what is rounded away between them would be kept" if cancels else None


def _value(found: _Chain) -> int | float:
    return found.first * found.second if found.product else found.first + found.second


def _chain(context: Context, node: Node, found: _Chain) -> Node:
    target = _aten.mul.Tensor if found.product else _aten.add.Tensor
    return call(node, target, (found.source, _value(found)), like=node)


# relu of relu, clamp of clamp: clamp(clamp(x, a, b), c, d) = clamp(x, a', b') with a', b' = a, b clamped to c, d

_UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True)
class _Clamps:
    inner: Node
    first: tuple[float, float]
    second: tuple[float, float]


def _find_clamps(context: Context, node: Node) -> _Clamps | None:
    second = _bounds(context, node)
    inner = node.args[0] if second and isinstance(node.args[0], Node) else None
    first = _bounds(context, inner) if inner is not None else None
    return _Clamps(inner, first, second) if first else None


def _bounds(context: Context, node: Node) -> tuple[float, float] | None:
    if node.op != "call_function" or node.target not in _CLAMPS:
        return None
    low, high = _CLAMPS[node.target](node)
    found = tuple(
        default if bound is None else number(context, bound)
        for bound, default in zip((low, high), _UNBOUNDED, strict=True)
    )
    return None if None in found or any(math.isnan(bound) for bound in found) else found


def _both(node: Node) -> tuple[Any, Any]:
    return argument(node, "min"), argument(node, "max")


_CLAMPS = {
    _aten.relu.default: lambda node: (0, None),
    _aten.relu6.default: lambda node: (0, 6),
    _aten.hardtanh.default: lambda node: (argument(node, "min_val"), argument(node, "max_val")),
    _aten.clamp.default: _both,
    _aten.clip.default: _both,
    _aten.clamp_min.default: lambda node: (argument(node, "min"), None),
    _aten.clamp_max.default: lambda node: (None, argument(node, "max")),
}


def _reason_against_clamps(context: Context, node: Node, found: _Clamps) -> str | None:
    source = found.inner.args[0]
    if reason := context.writes(node, found.inner, source):
        return reason
    if not same_type(node, source) or not same_type(found.inner, source):
        return "one of the two changes the dtype"
    if found.first[0] > found.first[1] or found.second[0] > found.second[1]:
        return "its bounds are crossed"
    if len(found.inner.users) > 1 and _merged(found) not in (found.first, found.second):
        return f"{found.inner.name} is used elsewhere"
    return None


def _merged(found: _Clamps) -> tuple[float, float]:
    low, high = found.second
    return min(max(found.first[0], low), high), min(max(found.first[1], low), high)


def _clamp(context: Context, node: Node, found: _Clamps) -> Node:
    merged, source = _merged(found), found.inner.args[0]
    if merged == found.first:
        return found.inner
    if merged == found.second:
        return call(node, node.target, (source, *node.args[1:]), dict(node.kwargs), like=node)
    low, high = (None if math.isinf(bound) else bound for bound in merged)
    if (low, high) == (0, None):
        return call(node, _aten.relu.default, (source,), like=node)
    return call(node, _aten.clamp.default, (source, low, high), like=node)


_RULES = (
    Rule("twice", _find_twice, _reason_against_same, _same),
    Rule("single", _find_single, _reason_against_same, _same),
    Rule("clamps", _find_clamps, _reason_against_clamps, _clamp),
    Rule("chain", _find_chain, _reason_against_chain, _chain),
)
