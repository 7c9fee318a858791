"""Weights rounded so that their layer's output keeps, not each weight by itself.

Layer by layer in graph order, with the inputs x that the rounded layers before give (and x' those of the float
program), the weights W of a layer are rounded to the W^ that lowers |W x' - W^ x|^2 over calibration data. That is a
quadratic form of the rounding errors with the Hessian E[x x^T]: Nagel et al., "Up or Down? Adaptive Rounding for
Post-Training Quantization", ICML 2020, section 3. The lattice point is found as in Frantar et al., "GPTQ", ICLR 2023,
section 3 (one weight after the other, the rest makes up for each error) and bettered by coordinate descent. Means go
into the bias, so that the Hessian is a covariance; where inputs are off by what came before, the float weights are
first fitted to them by ridge regression, which stays near the weights that they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.program.nodes import module_path
from edgeopt.program.qdq import is_dequantize
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import channels, findings, moments, rules
from edgeopt.quant.pairs import Walk, own_bias

DAMPING = 0.002  # of the mean variance of an input, added to every variance
SHRINKAGES = (0.9, 0.6, 0.2, 0.02)  # of a covariance towards its diagonal, until one is worse than the one before
SHRINK = (1.0, 0.9, 0.8, 0.7, 0.6)  # of the scale that holds the largest weight: a cut weight may cost less
SHRINK_WIDE = (1.0, 0.85)  # for rows of many weights, where each try takes time
WIDE = 256
SWEEPS = 3  # of coordinate descent, at most


@dataclass
class Rounded:
    """How many `layers` were rounded, the biases set with them, and the layers `left` as they were."""

    layers: int = 0
    biases: int = 0
    left: list[str] = field(default_factory=list)

    def in_words(self, rows: int) -> str:
        """One line for the report; `rows`: the samples that it took."""
        left = f"; left as they were: {', '.join(self.left)}" if self.left else ""
        return f"{self.layers} layers on {rows} samples{left}"


def round_weights(
    module: GraphModule, batches: Sequence[Sequence[torch.Tensor]], *, progress: Progress = SILENT
) -> Rounded:
    """Round the weights of a calibrated `module` (with observers) in place, and correct the biases.

    `batches`: positional tensors. All are in memory at once, and with them the values of both programs that are still
    needed: about four times the largest layer's output. A layer whose weight others use too, or whose padding is a
    word, keeps its weight.
    """
    findings.fit_biases(module)
    rounder = _Rounder(Rounded())
    Walk(module, batches).run("rounding weights", before=rounder.layer, progress=progress)
    return rounder.done


@dataclass(frozen=True)
class _Rounder:
    done: Rounded

    def layer(self, walk: Walk, node: Node) -> None:
        if rules.operator(node) not in channels.LAYERS or not _is_integer(node):
            return
        weight = node.args[1].args[0]
        x, exact = walk.values[node.args[0]][0][1], walk.values[node.args[1]][0][0]
        if len(weight.users) != 1 or len(node.args[1].users) != 1 or not moments.readable(node, x, exact):
            self.done.left.append(module_path(node) or node.name)
            return
        self._round(walk, node, weight)
        self.done.layers += 1

    def _round(self, walk: Walk, node: Node, weight: Node) -> None:
        bias = own_bias(node)
        exact = walk.values[node.args[1]][0][0]
        observer = walk.module.get_submodule(node.args[1].target)
        rows = _rows(exact, node)
        values = walk.values[node.args[0]]
        halves = [moments.of(node, values[i::2], exact) for i in (0, 1)]
        task = Task(
            rows, _scales(observer, rows), (observer.quant_min, observer.quant_max),
            least=_least_scale(walk, node, observer), centred=bias is not None, one_scale=observer.min_val.numel() == 1,
        )  # fmt: skip
        found = search(task, *halves)
        stored.tensor(walk.module, weight).copy_(found.weights.reshape(exact.shape))
        _set_scales(observer, found.scales.reshape(-1), task.scales.reshape(-1))
        walk.refresh(node.args[1])
        if bias is not None:
            self.done.biases += 1
            stored.tensor(walk.module, bias).add_(_shift(rows, found.weights, moments.together(*halves)).reshape(-1))


@dataclass(frozen=True)
class Task:
    """`weights` [groups, rows, inputs] to be rounded at `scales` [groups, rows] or a little less, to integers within
    `limits`; `least`: no scale below it; `centred`: a bias makes up for the mean; `one_scale`: the scales stay.
    """

    weights: torch.Tensor
    scales: torch.Tensor
    limits: tuple[int, int]
    least: torch.Tensor | float = 0.0
    centred: bool = True
    one_scale: bool = False


@dataclass(frozen=True)
class Found:
    """`weights` [groups, rows, inputs], already multiplied by `scales` [groups, rows]; `errors` of each row.

    `shrinkage`: that of the covariance, 1 where the inputs were taken for independent.
    """

    weights: torch.Tensor
    scales: torch.Tensor
    errors: torch.Tensor
    shrinkage: float = 1.0


def search(task: Task, one: moments.Moments, other: moments.Moments) -> Found:
    """The best rounding by both halves of the data; how far their covariance is believed is chosen across them.

    With few samples for many inputs a rounding may fit them and nothing else, so each shrinkage is tried on one half
    and its error taken on the other, against that of the nearest steps, which then is never exceeded there.
    """
    shrinkage, least = 1.0, _tried(task, 1.0, one, other)
    for less in SHRINKAGES:
        error = _tried(task, less, one, other)
        if error >= least:
            break
        shrinkage, least = less, error
    factors = (1.0,) if task.one_scale else SHRINK_WIDE if task.weights.shape[-1] > WIDE else SHRINK
    return best(task, moments.together(one, other), shrinkage, factors)


def _tried(task: Task, shrinkage: float, one: moments.Moments, other: moments.Moments) -> float:
    return float(_held_out(task, best(task, one, shrinkage, (1.0,), sweeps=0), one, other).sum())


def best(
    task: Task, seen: moments.Moments, shrinkage: float, factors: Sequence[float], *, sweeps: int = SWEEPS
) -> Found:
    """The best rounding found at the scales times `factors`; never worse than the nearest steps by its `errors`."""
    seen = seen.centred() if task.centred else seen
    hessian, cross = _shrunk(seen.hessian, shrinkage), seen.cross * (1 - shrinkage)
    target, upper = task.weights, None
    if shrinkage < 1.0:
        fitted = torch.linalg.solve(hessian, (target.double() @ cross).transpose(1, 2)).transpose(1, 2)
        target, upper = target + fitted.to(target.dtype), _upper(hessian)
    hessian = hessian.to(target.dtype)
    nearest = _steps(task.weights, task.scales, task.limits)
    found = Found(nearest, task.scales, _errors(nearest, target, hessian), shrinkage)
    for factor in factors:
        scales = torch.maximum(task.scales * factor, torch.as_tensor(task.least).minimum(task.scales))
        if upper is not None:
            rounded = _one_by_one(target, upper, scales, task.limits)
            rounded = _descend(rounded, target, hessian, scales, task.limits, sweeps)
        else:
            rounded = _steps(target, scales, task.limits)
        errors = _errors(rounded, target, hessian)
        better = errors < found.errors
        found = Found(
            torch.where(better[..., None], rounded, found.weights),
            torch.where(better, scales, found.scales),
            torch.where(better, errors, found.errors),
            shrinkage,
        )
    return found


def _shrunk(hessian: torch.Tensor, shrinkage: float) -> torch.Tensor:
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    floor = (DAMPING * diagonal.mean(-1, keepdim=True)).clamp_min(torch.finfo(hessian.dtype).tiny)
    return hessian * (1 - shrinkage) + torch.diag_embed(diagonal * shrinkage + floor)


def _shift(weights: torch.Tensor, rounded: torch.Tensor, seen: moments.Moments) -> torch.Tensor:
    """[groups, rows]: what the mean of the outputs is off by, which goes into the bias."""
    exact = (seen.mean + seen.off)[..., None]
    return (weights.double() @ exact - rounded.double() @ seen.mean[..., None])[..., 0]


def _held_out(task: Task, found: Found, fitted: moments.Moments, held: moments.Moments) -> torch.Tensor:
    """[groups, rows]: the squared error of the outputs over `held`, less a term that no rounding changes."""
    off = (task.weights - found.weights).double()
    error = ((off @ held.hessian) * off).sum(-1) + 2 * ((task.weights.double() @ held.cross) * off).sum(-1)
    if task.centred:
        shift = _shift(task.weights, found.weights, fitted)
        error = error + shift**2 - 2 * shift * _shift(task.weights, found.weights, held)
    return error


def _steps(weights: torch.Tensor, scales: torch.Tensor, limits: tuple[int, int]) -> torch.Tensor:
    return (weights / scales[..., None]).round().clamp(*limits) * scales[..., None]


def _errors(rounded: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    off = rounded - target
    return ((off @ hessian) * off).sum(-1)


@dataclass(frozen=True)
class _Upper:
    """`factor` [groups, d, d]: upper Cholesky factor of the inverse Hessian of the inputs in `order` [groups, d]."""

    factor: torch.Tensor
    order: torch.Tensor


def _upper(hessian: torch.Tensor) -> _Upper:
    """The inputs of the largest variance first, so that the others can make up for them."""
    order = hessian.diagonal(dim1=-2, dim2=-1).argsort(-1, descending=True)
    size = order.shape[-1]
    permuted = hessian.gather(1, order[:, :, None].expand(-1, -1, size)).gather(2, order[:, None].expand(-1, size, -1))
    return _Upper(torch.linalg.cholesky(torch.linalg.inv(permuted), upper=True).float(), order)


def _one_by_one(target: torch.Tensor, upper: _Upper, scales: torch.Tensor, limits: tuple[int, int]) -> torch.Tensor:
    """GPTQ: one input after the other; what a weight is off by, those after it make up for."""
    columns, factor = upper.order[:, None, :].expand_as(target), upper.factor
    left, out = target.gather(2, columns), torch.empty_like(target)
    for j in range(target.shape[-1]):
        out[..., j] = _steps(left[..., j : j + 1], scales, limits)[..., 0]
        off = (left[..., j] - out[..., j]) / factor[:, j, j][:, None]
        left[..., j + 1 :] -= off[..., None] * factor[:, j, None, j + 1 :]
    return out.gather(2, upper.order.argsort(-1)[:, None, :].expand_as(target))


def _descend(
    rounded: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, limits: tuple[int, int],
    sweeps: int,
) -> torch.Tensor:  # fmt: skip
    """Coordinate descent on the lattice: each weight in turn to its best step, the others held; never worse."""
    rounded = rounded.clone()
    gradient = (rounded - target) @ hessian
    for _ in range(sweeps):
        moved = False
        for j in range(rounded.shape[-1]):
            wanted = rounded[..., j] - gradient[..., j] / hessian[:, j, j][:, None]
            step = _steps(wanted[..., None], scales, limits)[..., 0] - rounded[..., j]
            step = torch.where(step.abs() > 0.5 * scales, step, torch.zeros_like(step))
            if bool(step.any()):
                moved = True
                rounded[..., j] += step
                gradient += step[..., None] * hessian[:, j, None, :]
        if not moved:
            break
    return rounded


def _rows(weight: torch.Tensor, node: Node) -> torch.Tensor:
    """[groups, rows, inputs] of a weight [out, in / groups, ...]."""
    groups = channels.groups_of(node)
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def _scales(observer: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    scale, _ = observer.calculate_qparams()
    return scale.to(rows.dtype).expand(rows.shape[0] * rows.shape[1]).reshape(rows.shape[:2])


def _least_scale(walk: Walk, node: Node, observer: torch.nn.Module) -> torch.Tensor | float:
    """Below it the int32 bias at input scale times weight scale would not fit."""
    bias = own_bias(node)
    source = node.args[0]
    if bias is None or source.op != "call_module" and not is_dequantize(source):
        return 0.0
    scale = source.args[1] if is_dequantize(source) else walk.module.get_submodule(source.target).calculate_qparams()[0]
    least = stored.tensor(walk.module, bias).abs() / (scale * 2.0**29)
    return least.reshape(channels.groups_of(node), -1)


def _set_scales(observer: torch.nn.Module, scales: torch.Tensor, before: torch.Tensor) -> None:
    """Give the observer ranges of the smaller scales; where they are the old ones its ranges stay."""
    if observer.min_val.numel() != scales.numel():
        return
    half = scales * (observer.quant_max - observer.quant_min) / 2
    smaller = scales < before
    observer.max_val.copy_(torch.where(smaller, half, observer.max_val))
    observer.min_val.copy_(torch.where(smaller, -half, observer.min_val))


def _is_integer(node: Node) -> bool:
    weight = node.args[1]
    return (
        isinstance(weight, Node) and weight.op == "call_module"
        and isinstance(weight.args[0], Node) and weight.args[0].op == "get_attr"
    )  # fmt: skip
