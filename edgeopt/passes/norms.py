"""LayerNorm and RMSNorm written out by hand, as the operators that they are.

LayerNorm is (x - mean) / sqrt(var + eps) gamma + beta with the variance of all values (not one fewer) and eps under
the root; RMSNorm is x / sqrt(mean(x^2) + eps) gamma (arXiv 1607.06450 and 1910.07467). The normalised value becomes
the operator first, then the operator takes gamma and beta where they follow. E[x^2] - E[x]^2 stays as it is: it
cancels where the mean is large, so the operator's answer would be another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from edgeopt.passes import fusing, target_torch
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.layers import argument
from edgeopt.passes.rewrite import Rule
from edgeopt.passes.scalars import dtype, number, same_type, sizes

_aten = torch.ops.aten
_MUL, _DIV = {_aten.mul.Tensor}, {_aten.div.Tensor}
_ADD, _SUB = {_aten.add.Tensor, _aten.add.Scalar}, {_aten.sub.Tensor}
_VAR = {_aten.var.dim, _aten.var.correction}
_STD = {_aten.std.dim, _aten.std.correction}


def layer_norm(context: Context) -> Changed:
    return fusing.apply(context, (_LAYER_NORM, _GAMMA, _BETA))


def rms_norm(context: Context) -> Changed:
    return fusing.apply(context, (_RMS_NORM, _RMS_GAMMA))


@dataclass(frozen=True)
class _Norm:
    """`centred` x, or x itself, over the root of the mean of its squares over `dims`, plus `eps`."""

    x: Node
    dims: tuple[int, ...]
    eps: float
    inside: tuple[Node, ...]
    gamma: Node | None = None
    unless: str | None = None


# the normalised value


def _find_layer_norm(context: Context, node: Node) -> _Norm | None:
    for numerator, root in _quotients(node):
        for centred, gamma in _without_factor(numerator):
            mean = _centred(centred)
            found = _over_deviation(context, root, centred, *mean) if mean else None
            if found:
                between = () if gamma is None else (numerator,)
                inside = (*found.inside, *between, centred, centred.args[1])
                return _Norm(found.x, found.dims, found.eps, inside, gamma, found.unless)
    return None


def _find_rms_norm(context: Context, node: Node) -> _Norm | None:
    for x, root in _quotients(node):
        inside: list[Node] = []
        total = _under_root(context, root, inside)
        dims = _mean_of_squares(total[0], x, inside) if total else None
        if dims:
            return _Norm(x, dims, total[1], tuple(inside))
    return None


def _quotients(node: Node) -> Iterator[tuple[Node, Node]]:
    """(a, r) for a / r, and for a * r where r is one over a root: both are a over what is under the root."""
    if node.target not in _MUL | _DIV or not all(isinstance(a, Node) for a in node.args[:2]):
        return
    if node.kwargs.get("rounding_mode"):
        return
    a, b = node.args
    if node.target in _DIV:
        yield a, b
    else:
        yield from ((x, r) for x, r in ((a, b), (b, a)) if _is_inverse(r))


def _is_inverse(node: Node) -> bool:
    if node.target in (_aten.rsqrt.default, _aten.reciprocal.default):
        return True
    return node.target is _aten.pow.Tensor_Scalar and node.args[1] == -0.5


def _without_factor(node: Node) -> Iterator[tuple[Node, Node | None]]:
    yield node, None
    if node.target in _MUL and all(isinstance(a, Node) for a in node.args):
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def _centred(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """x and the dims of the mean, where the node is x - mean(x)."""
    if node.target not in _SUB or argument(node, "alpha") != 1 or not isinstance(node.args[1], Node):
        return None
    x, mean = node.args
    dims = _mean_dims(mean)
    return (x, dims) if dims and mean.args[0] is x else None


def _mean_dims(node: Node) -> tuple[int, ...] | None:
    """The axes of a mean that keeps them, in order."""
    if node.target is not _aten.mean.dim or not argument(node, "keepdim") or not argument(node, "dim"):
        return None
    if argument(node, "dtype") not in (None, dtype(node.args[0])):
        return None
    return _axes(node)


def _axes(node: Node) -> tuple[int, ...]:
    rank, dims = len(sizes(node.args[0])), argument(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({dim % rank for dim in dims})) if rank else ()


def _under_root(context: Context, root: Node, inside: list[Node]) -> tuple[Node, float] | None:
    """v and eps of sqrt(v + eps), its powers and its inverses; what leads there is added to `inside`."""
    inside.append(root)
    if root.target is _aten.reciprocal.default:
        root = root.args[0]
        inside.append(root)
        if root.target is _aten.rsqrt.default:
            return None
    is_power = root.target is _aten.pow.Tensor_Scalar and abs(root.args[1]) == 0.5
    if not is_power and root.target not in (_aten.sqrt.default, _aten.rsqrt.default):
        return None
    total = root.args[0]
    if total.target not in _ADD or argument(total, "alpha") != 1:
        return None
    for v, eps in (total.args[:2], total.args[1::-1]):
        value = number(context, eps)
        if isinstance(v, Node) and value is not None and value > 0:
            inside.append(total)
            return v, float(value)
    return None


def _over_deviation(
    context: Context, root: Node, centred: Node, x: Node, dims: tuple[int, ...]
) -> _Norm | None:  # fmt: skip
    inside: list[Node] = []
    total = _under_root(context, root, inside)
    if total is None:
        outside = _deviation_plus_eps(context, root, x)
        return (
            _Norm(x, dims, math.nan, (), None, "eps is added to the deviation, outside the root") if outside else None
        )
    variance, eps = total
    squares = _mean_of_squares(variance, centred, inside)
    if squares is not None:
        unless = None if squares == dims else "mean and variance are over other dimensions"
        return _Norm(x, dims, eps, tuple(inside), None, unless)
    if variance.target in _VAR and variance.args[0] is x and argument(variance, "keepdim"):
        inside.append(variance)
        unless = None if _axes(variance) == dims else "mean and variance are over other dimensions"
        return _Norm(x, dims, eps, tuple(inside), None, unless or _unless_biased(variance))
    if variance.target in _SUB:
        return _Norm(x, dims, eps, (), None, "its variance is E[x^2] - E[x]^2, which cancels")
    return None


def _deviation_plus_eps(context: Context, root: Node, x: Node) -> bool:
    if root.target not in _ADD or number(context, root.args[1]) is None:
        return False
    below = root.args[0]
    if below.target is _aten.sqrt.default:
        below = below.args[0]
    return below.target in _STD | _VAR and below.args[0] is x


def _unless_biased(variance: Node) -> str | None:
    if variance.target is _aten.var.dim:
        one_fewer = argument(variance, "unbiased")
    else:
        one_fewer = argument(variance, "correction") != 0
    return "its variance divides by one fewer than the number of values" if one_fewer else None


def _mean_of_squares(node: Node, x: Node, inside: list[Node]) -> tuple[int, ...] | None:
    """The dims of mean(x^2), where `node` is that; the two operators are added to `inside`."""
    dims = _mean_dims(node)
    square = node.args[0] if dims else None
    if square is None or not _is_square(square, x):
        return None
    inside += [node, square]
    return dims


def _is_square(node: Node, x: Node) -> bool:
    if node.target is _aten.square.default:
        return node.args[0] is x
    if node.target is _aten.pow.Tensor_Scalar:
        return node.args[0] is x and node.args[1] == 2
    return node.target in _MUL and node.args[0] is x and node.args[1] is x


def _reason_against(context: Context, node: Node, found: _Norm, pattern: str) -> str | None:
    if found.unless:
        return found.unless
    tied = fusing.tied(context, node, found.inside, (found.x,))
    if tied:
        return tied
    rank = len(sizes(found.x))
    if found.dims != tuple(range(rank - len(found.dims), rank)):
        return f"it normalises over dimensions {list(found.dims)} of {rank}, and the operator over the last ones"
    if not all(size.isdigit() for size in sizes(found.x)[-len(found.dims) :]):
        return "it normalises over a dynamic axis"
    if not same_type(node, found.x) or not dtype(found.x).is_floating_point:
        return "it changes dtype or shape on its way"
    if found.gamma is not None and _as_weight(found.gamma, _shape(found)) is None:
        return f"{found.gamma.name} has no value for each of the normalised ones"
    return target_torch.left_out(context.profile, pattern) or target_torch.lacks(context.profile, pattern)


def _shape(found: _Norm) -> list[int]:
    return [int(size) for size in sizes(found.x)[-len(found.dims) :]]


def _write_layer_norm(context: Context, node: Node, found: _Norm) -> Node:
    shape = _shape(found)
    gamma = None if found.gamma is None else _weight(node, found.gamma, shape)
    return call(node, _aten.layer_norm.default, (found.x, shape, gamma, None, found.eps), like=node)


def _write_rms_norm(context: Context, node: Node, found: _Norm) -> Node:
    return call(node, _aten.rms_norm.default, (found.x, _shape(found), None, found.eps), like=node)


# gamma and beta that follow


@dataclass(frozen=True)
class _Following:
    norm: Node
    operand: Node


def _find_gamma(context: Context, node: Node) -> _Following | None:
    return _following(node, _MUL, _aten.layer_norm.default, lambda norm: norm.args[2:4] == (None, None))


def _find_rms_gamma(context: Context, node: Node) -> _Following | None:
    return _following(node, _MUL, _aten.rms_norm.default, lambda norm: norm.args[2] is None)


def _find_beta(context: Context, node: Node) -> _Following | None:
    plain = node.target in _ADD and argument(node, "alpha") == 1
    return _following(
        node, _ADD, _aten.layer_norm.default, lambda norm: plain and norm.args[2] is not None and norm.args[3] is None
    )


def _following(node: Node, targets: set, norm: Any, is_open: Any) -> _Following | None:
    if node.target not in targets or not all(isinstance(a, Node) for a in node.args[:2]):
        return None
    for a, b in (node.args[:2], node.args[1::-1]):
        full = a.target is norm and len(a.args) >= 4
        if full and is_open(a) and _as_weight(b, a.args[1]) is not None:
            return _Following(a, b)
    return None


def _as_weight(operand: Node, shape: list[int]) -> str | None:
    """'as it is' or 'reshaped' where the operand has one value for each normalised one; None else."""
    wanted, have = [str(size) for size in shape], list(sizes(operand) or ())
    if have == wanted:
        return "as it is"
    leading = len(have) - len(wanted)
    return "reshaped" if leading > 0 and have[leading:] == wanted and set(have[:leading]) == {"1"} else None


def _weight(node: Node, operand: Node, shape: list[int]) -> Node:
    if _as_weight(operand, shape) == "as it is":
        return operand
    return call(node, _aten.reshape.default, (operand, list(shape)), like=node)


def _reason_against_following(context: Context, node: Node, found: _Following) -> str | None:
    if not same_type(node, found.norm) or dtype(found.operand) != dtype(node):
        return "it changes dtype or shape on its way"
    return fusing.tied(context, node, (found.norm,), (found.operand,))


def _put(place: int, context: Context, node: Node, found: _Following) -> Node:
    """The norm with the operand as its argument number `place`."""
    args = list(found.norm.args)
    args[place] = _weight(node, found.operand, args[1])
    return call(node, found.norm.target, tuple(args), like=found.norm)


_put_gamma, _put_beta = partial(_put, 2), partial(_put, 3)
_LAYER_NORM = Rule(
    "layer_norm", _find_layer_norm, lambda c, n, f: _reason_against(c, n, f, "layer_norm"), _write_layer_norm
)
_RMS_NORM = Rule("rms_norm", _find_rms_norm, lambda c, n, f: _reason_against(c, n, f, "rms_norm"), _write_rms_norm)
_GAMMA = Rule("gamma", _find_gamma, _reason_against_following, _put_gamma)
_RMS_GAMMA = Rule("gamma", _find_rms_gamma, _reason_against_following, _put_gamma)
_BETA = Rule("beta", _find_beta, _reason_against_following, _put_beta)
