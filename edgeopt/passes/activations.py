"""Activations written out by hand, as the operators that they are: gelu, silu, hardswish, hardsigmoid, mish, softplus.

Each is a function f of a polynomial in x, times another polynomial in x and f; the table below says which. Runtimes
have one kernel for the whole, and the quantizer sees one float operator rather than several (x, sigmoid and product
quantized each leave few values below 0, case Q03).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from edgeopt.passes import fusing, target_torch
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.layers import argument
from edgeopt.passes.polynomial import ARITHMETIC, Polynomial, Reading, Unknown, equal, similar
from edgeopt.passes.rewrite import Rule
from edgeopt.passes.scalars import number, same_type

_aten = torch.ops.aten
_ROOT_HALF, _ROOT_2_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)
_CUBIC = {(1,): _ROOT_2_PI, (3,): 0.044715 * _ROOT_2_PI}  # Hendrycks and Gimpel, arXiv 1606.08415


@dataclass(frozen=True)
class Form:
    """`whole(x, f)` = f times and plus powers of x, where f is one of `inner` applied to `argument(x)`.

    The keys of `argument` are the exponents of x, of `whole` those of x and f. `inner` recognises f and gives
    the operators from below it down to what it is applied to. `since` names the operator in target_torch.SINCE.
    """

    name: str
    inner: Callable[[Context, Node], tuple[Node, ...]]
    argument: Polynomial
    whole: Polynomial
    target: torch._ops.OpOverload
    kwargs: dict[str, Any] = field(default_factory=dict)
    since: str = ""


Path = tuple[Node, ...]  # the operators between f and what it is a function of, and that


def _applied(*targets: torch._ops.OpOverload) -> Callable[[Context, Node], Path]:
    return lambda context, node: _path(node.args[0]) if node.target in targets else ()


def _path(*nodes: Any) -> Path:
    return nodes if all(isinstance(node, Node) for node in nodes) else ()


def _clamped(high: float) -> Callable[[Context, Node], Path]:
    """A clamp to 0 ... `high`, by any of its names."""

    def inner(context: Context, node: Node) -> Path:
        if node.target is _aten.relu6.default:
            return _path(node.args[0]) if high == 6 else ()
        names = _BOUNDS.get(node.target)
        if names is None or [number(context, argument(node, name)) for name in names] != [0, high]:
            return ()
        return _path(node.args[0])

    return inner


_BOUNDS = {
    _aten.hardtanh.default: ("min_val", "max_val"),
    _aten.clamp.default: ("min", "max"),
    _aten.clip.default: ("min", "max"),
}


def _tanh_of_softplus(context: Context, node: Node) -> Path:
    inner = node.args[0] if node.target is _aten.tanh.default else None
    if not isinstance(inner, Node):
        return ()
    if inner.target is _aten.softplus.default:
        plain = argument(inner, "beta") == 1 and argument(inner, "threshold") == 20
        return _path(inner, inner.args[0]) if plain else ()
    below = _log_of_one_plus_exp(context, inner)  # that of a large x is infinite, its tanh 1 all the same
    return (inner, *below) if below else ()


def _log_of_one_plus_exp(context: Context, node: Node) -> Path:
    """From log(1 + exp(x)) or log1p(exp(x)) down to x."""
    if node.target not in (_aten.log.default, _aten.log1p.default) or not isinstance(node.args[0], Node):
        return ()
    inner, between = node.args[0], ()
    if node.target is _aten.log.default:
        if inner.target not in (_aten.add.Tensor, _aten.add.Scalar) or argument(inner, "alpha") != 1:
            return ()
        exp = next((a for a, b in (inner.args[:2], inner.args[1::-1]) if number(context, b) == 1), None)
        inner, between = exp, (inner,)
    is_exp = isinstance(inner, Node) and inner.target is _aten.exp.default
    return _path(*between, inner, inner.args[0]) if is_exp else ()


_HALVES = {(1, 0): 0.5, (1, 1): 0.5}
_TIMES = {(1, 1): 1.0}
_TANH_GELU = {"target": _aten.gelu.default, "kwargs": {"approximate": "tanh"}, "since": "gelu with approximate='tanh'"}
_erf, _erfc, _tanh = _applied(_aten.erf.default), _applied(_aten.erfc.default), _applied(_aten.tanh.default)
_sigmoid, _hardsigmoid = _applied(_aten.sigmoid.default), _applied(_aten.hardsigmoid.default)

GELU = (
    Form("gelu", _erf, {(1,): _ROOT_HALF}, _HALVES, _aten.gelu.default),
    Form("gelu", _erfc, {(1,): -_ROOT_HALF}, {(1, 1): 0.5}, _aten.gelu.default),
    Form("gelu by tanh", _tanh, _CUBIC, _HALVES, **_TANH_GELU),
    Form("gelu by tanh", _sigmoid, {p: 2 * c for p, c in _CUBIC.items()}, _TIMES, **_TANH_GELU),
)
SILU = (
    Form("silu", _sigmoid, {(1,): 1.0}, _TIMES, _aten.silu.default, since="silu"),
    Form("hardswish", _clamped(6), {(0,): 3.0, (1,): 1.0}, {(1, 1): 1 / 6}, _aten.hardswish.default, since="hardswish"),
    Form("hardswish", _clamped(1), {(0,): 0.5, (1,): 1 / 6}, _TIMES, _aten.hardswish.default, since="hardswish"),
    Form("hardswish", _hardsigmoid, {(1,): 1.0}, _TIMES, _aten.hardswish.default, since="hardswish"),
    Form("hardsigmoid", _clamped(6), {(0,): 3.0, (1,): 1.0}, {(0, 1): 1 / 6}, _aten.hardsigmoid.default,
         since="hardsigmoid"),
    Form("hardsigmoid", _clamped(1), {(0,): 0.5, (1,): 1 / 6}, {(0, 1): 1.0}, _aten.hardsigmoid.default,
         since="hardsigmoid"),
    Form("mish", _tanh_of_softplus, {(1,): 1.0}, _TIMES, _aten.mish.default, since="mish"),
)  # fmt: skip


def gelu(context: Context) -> Changed:
    return _run(context, "gelu", partial(_find, forms=GELU))


def silu(context: Context) -> Changed:
    return _run(context, "silu", partial(_find, forms=SILU), _find_by_exp, _find_softplus)


def _run(context: Context, pattern: str, *finds: Callable[[Context, Node], _Found | None]) -> Changed:
    reason = partial(_reason, pattern=pattern)
    return fusing.apply(context, [Rule(pattern, find, reason, _write) for find in finds])


@dataclass(frozen=True)
class _Found:
    """`form` of `x`, made of the operators `inside`, the last one apart; or why it only looks so."""

    form: Form
    x: Node
    inside: tuple[Node, ...]
    unless: str | None = None


def _find(context: Context, node: Node, forms: tuple[Form, ...]) -> _Found | None:
    if node.op != "call_function":
        return None
    miss = None
    for inner in _inner_functions(node):
        for form in forms:
            path = form.inner(context, inner)
            for x in _below(path[-1]) if path else ():
                found = _match(context, node, form, (inner, *path), x)
                if found and not found.unless:
                    return found
                miss = miss or (found if node is not inner else None)
    return None if any(_scales(context, user) for user in node.users) else miss


def _scales(context: Context, node: Node) -> bool:
    """Whether the node may be the last factor of a form, which is then known by it."""
    numbers = [number(context, value) for value in node.args[:2]]
    return node.target in ARITHMETIC and any(value is not None for value in numbers)


def _inner_functions(node: Node, depth: int = 4) -> Iterator[Node]:
    """The nodes below `node`, through arithmetic, that are no arithmetic themselves; `node` itself if it is none."""
    if node.op != "call_function":
        return
    if node.target not in ARITHMETIC:
        yield node
    elif depth:
        for source in node.all_input_nodes:
            yield from _inner_functions(source, depth - 1)


def _below(node: Node) -> Iterator[Node]:
    """`node` and what its arithmetic is made of, nearest first: what x may be."""
    seen, ahead = {node}, [node]
    while ahead and len(seen) < 16:
        at = ahead.pop(0)
        yield at
        if at.op == "call_function" and at.target in ARITHMETIC:
            fresh = [source for source in at.all_input_nodes if source not in seen]
            seen.update(fresh)
            ahead += fresh


def _match(context: Context, node: Node, form: Form, path: Path, x: Node) -> _Found | None:
    whole, below = Reading(context, (x, path[0])), Reading(context, (x,))
    try:
        outer_polynomial, inner_polynomial = whole.of(node), below.of(path[-1])
    except Unknown:
        return None
    if not similar(outer_polynomial, form.whole) or not similar(inner_polynomial, form.argument):
        return None
    inside = (*whole.inside, *path[:-1], *below.inside)
    exact = equal(outer_polynomial, form.whole) and equal(inner_polynomial, form.argument)
    reason = None if exact else f"its constants are not those of {form.name}"
    return _Found(form, x, tuple(n for n in dict.fromkeys(inside) if n is not node), reason)


def _reason(context: Context, node: Node, found: _Found, pattern: str) -> str | None:
    if found.unless:
        return found.unless
    tied = fusing.tied(context, node, (n for n in found.inside if not _is_multiple(context, n, found.x)), (found.x,))
    if tied:
        return tied
    if not same_type(node, found.x) or not node.meta["val"].dtype.is_floating_point:
        return "it changes dtype or shape on its way"
    return target_torch.left_out(context.profile, pattern) or target_torch.lacks(context.profile, found.form.since)


def _is_multiple(context: Context, node: Node, x: Node) -> bool:
    """Whether the node is x times or plus a number, as two forms of one x may share."""
    of = [value for value in node.args[:2] if number(context, value) is None]
    return node.target in ARITHMETIC and of == [x]


def _write(context: Context, node: Node, found: _Found) -> Node:
    return call(node, found.form.target, (found.x,), dict(found.form.kwargs), like=node)


# forms that are no polynomial

_SILU_BY_EXP = Form("silu", _sigmoid, {}, {}, _aten.silu.default, since="silu")
_SOFTPLUS = Form("softplus", _sigmoid, {}, {}, _aten.softplus.default)


def _find_by_exp(context: Context, node: Node) -> _Found | None:
    """x / (1 + exp(-x)); where exp overflows both give 0."""
    if node.target is not _aten.div.Tensor or node.kwargs.get("rounding_mode") or not isinstance(node.args[1], Node):
        return None
    x, below = node.args
    exp = next(_inner_functions(below), None) if isinstance(x, Node) else None
    if exp is None or exp.target is not _aten.exp.default or below is exp:
        return None
    denominator, power = Reading(context, (exp,)), Reading(context, (x,))
    try:
        right = equal(denominator.of(below), {(0,): 1.0, (1,): 1.0}) and equal(power.of(exp.args[0]), {(1,): -1.0})
    except Unknown:
        return None
    return _Found(_SILU_BY_EXP, x, (exp, *denominator.inside, *power.inside)) if right else None


def _find_softplus(context: Context, node: Node) -> _Found | None:
    """relu(x) + log(1 + exp(-|x|)), and log(1 + exp(x)), which alone is infinite for a large x."""
    if path := _log_of_one_plus_exp(context, node):
        if any(user.target is _aten.tanh.default or user.target in ARITHMETIC for user in node.users):
            return None  # a part of mish or of the other form, which are known by their last operator
        return _Found(_SOFTPLUS, path[-1], (), "log(1 + exp(x)) is infinite for x above 88, where softplus is x")
    if node.target is not _aten.add.Tensor or argument(node, "alpha") != 1:
        return None
    for relu, log in (node.args[:2], node.args[1::-1]):
        path = _log_of_one_plus_exp(context, log) if isinstance(log, Node) else ()
        if path and isinstance(relu, Node) and _is_relu(context, relu):
            power = Reading(context, tuple(_inner_functions(path[-1])))
            if _is_minus_abs(power, path[-1], relu.args[0]):
                inside = (relu, log, *path[:-1], *power.inside, *power.atoms)
                return _Found(_SOFTPLUS, relu.args[0], inside)
    return None


def _is_relu(context: Context, node: Node) -> bool:
    if node.target is _aten.relu.default:
        return True
    if node.target not in (_aten.clamp.default, _aten.clip.default, _aten.clamp_min.default):
        return False
    high = None if node.target is _aten.clamp_min.default else argument(node, "max")
    return number(context, argument(node, "min")) == 0 and high is None


def _is_minus_abs(power: Reading, below: Node, x: Node) -> bool:
    if len(power.atoms) != 1 or power.atoms[0].target is not _aten.abs.default or power.atoms[0].args[0] is not x:
        return False
    try:
        return equal(power.of(below), {(1,): -1.0})
    except Unknown:
        return False
