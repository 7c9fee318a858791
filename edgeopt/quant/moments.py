"""Second moments of what a layer reads: the Hessian of its output's squared error in its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.quant import channels, rules
from edgeopt.quant.pairs import Pair

# Output positions that count, over a half of the batches: about those, evenly spread; more where a row has many inputs.
POSITIONS = 1 << 14
FOR_EACH_INPUT = 40


@dataclass(frozen=True)
class Moments:
    """Of a layer of `groups` groups of d inputs each: of the rounded inputs x, and of e = (exact x) - x.

    `hessian` E[x x^T] and `cross` E[e x^T], [groups, d, d]; `mean` of x and `off` of e, [groups, d]; over `count`
    positions. In float64.
    """

    hessian: torch.Tensor
    cross: torch.Tensor
    mean: torch.Tensor
    off: torch.Tensor
    count: int

    def centred(self) -> Moments:
        """With the means taken off, for a layer whose bias makes up for them."""
        hessian = self.hessian - self.mean[:, :, None] * self.mean[:, None, :]
        cross = self.cross - self.off[:, :, None] * self.mean[:, None, :]
        return Moments(hessian, cross, self.mean, self.off, self.count)


def together(a: Moments, b: Moments) -> Moments:
    """The moments over the positions of both, which are not centred."""
    count = a.count + b.count
    mixed = [(getattr(a, n) * a.count + getattr(b, n) * b.count) / count for n in ("hessian", "cross", "mean", "off")]
    return Moments(*mixed, count)


def readable(node: Node, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the layer's geometry is in numbers (a padding may be a word) and `x` has an axis of samples."""
    if rules.operator(node) == "linear":
        return True
    return not isinstance(_argument(node, 4, 0), str) and x.ndim == weight.ndim


def of(node: Node, values: Sequence[Pair], weight: torch.Tensor) -> Moments:
    """The moments over the pairs (exact, rounded) of the layer's input."""
    groups, size = channels.groups_of(node), weight[0].numel()
    squares = torch.zeros(groups, size, size, dtype=torch.float64)
    cross = torch.zeros_like(squares)
    mean, off = (torch.zeros(groups, size, dtype=torch.float64) for _ in range(2))
    each = max(POSITIONS, FOR_EACH_INPUT * size) // len(values)
    origin, count = None, 0
    for turn, (exact, rounded) in enumerate(values):
        x = _columns(node, rounded, weight, groups, each, turn)
        e = _columns(node, exact, weight, groups, each, turn) - x
        # near the mean, so that float32 products keep the variance of values that are far from 0
        origin = x.mean(2, keepdim=True) if origin is None else origin
        x = x - origin
        squares += x @ x.transpose(1, 2)
        cross += e @ x.transpose(1, 2)
        mean += x.sum(2)
        off += e.sum(2)
        count += x.shape[2]
    squares, cross, mean, off = squares / count, cross / count, mean / count, off / count
    c = origin[..., 0].double()
    hessian = squares + c[:, :, None] * mean[:, None, :] + mean[:, :, None] * c[:, None, :] + c[:, :, None] * c[:, None]
    return Moments(hessian, cross + off[:, :, None] * c[:, None, :], mean + c, off, count)


def _columns(node: Node, x: torch.Tensor, weight: torch.Tensor, groups: int, most: int, turn: int) -> torch.Tensor:
    """[groups, inputs, positions]: the inputs of the layer's outputs at about `most` positions."""
    if rules.operator(node) == "linear":
        rows = x.reshape(-1, x.shape[-1])
        step = max(1, rows.shape[0] // most)
        return rows[turn % step :: step].T[None]
    dims = weight.ndim - 2
    stride, padding, dilation = (_numbers(node, i, default, dims) for i, default in ((3, 1), (4, 0), (5, 1)))
    x = torch.nn.functional.pad(x, [p for pad in reversed(padding) for p in (pad, pad)])
    for d in range(dims):
        taps = weight.shape[2 + d]
        x = x.unfold(2 + d, dilation[d] * (taps - 1) + 1, stride[d])
        x = x[..., :: dilation[d]]
    positions = x.shape[0]
    for d in range(dims):
        positions *= x.shape[2 + d]
    step = max(1, round((positions / most) ** (1 / dims)))
    for d in range(dims):
        here = min(step, x.shape[2 + d])
        x = x[(slice(None),) * (2 + d) + (slice(turn % here, None, here),)]
    samples, inputs = x.shape[:2]
    x = x.reshape(samples, groups, inputs // groups, *x.shape[2:])
    outs, taps = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    return x.permute(1, 2, *taps, 0, *outs).reshape(groups, weight[0].numel(), -1)


def _argument(node: Node, index: int, default: object) -> object:
    return node.args[index] if len(node.args) > index else default


def _numbers(node: Node, index: int, default: int, dims: int) -> list[int]:
    given = _argument(node, index, default)
    given = [given] if isinstance(given, int) else list(given)
    return given * dims if len(given) == 1 else given
