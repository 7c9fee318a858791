"""What calibrated observers show: ranges that cost accuracy, dead channels, biases that an int32 cannot hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from edgeopt.program.nodes import module_path
from edgeopt.quant import observers, pt2e

MOST_DEVIATIONS = 150  # a normal distribution of a million values is 10 wide
LEAST_STEPS = 32  # fewer steps over the values seen: more than three of eight bits lie where no value is


def observed(module: GraphModule) -> Iterator[tuple[Node, torch.nn.Module]]:
    """(the node that is observed, its observer) in graph order, each observer once; fake-quantizers give theirs."""
    seen = set()
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        observer = module.get_submodule(node.target)
        if isinstance(observer, pt2e.ObserverBase | pt2e.FakeQuantizeBase) and id(observer) not in seen:
            seen.add(id(observer))
            yield node.args[0], observer


def _ranges(observer: torch.nn.Module) -> torch.nn.Module:
    """The part that holds min_val and max_val."""
    return getattr(observer, "activation_post_process", observer)


def fit_biases(module: GraphModule) -> None:
    """Widen the weight scale of channels whose bias would not fit an int32 at input scale times weight scale.

    Such channels have weights that are tiny beside their bias, so that coarser weights change nothing that shows.
    """
    for node, observer in observed(module):
        if isinstance(observer, pt2e.DerivedObserverOrFakeQuantize):
            source, weight = observer.obs_or_fqs
            bias = stored(module, node).abs()
            source_scale, _ = source.calculate_qparams()
            least = bias / (source_scale * 2.0**30)
            ranges = _ranges(weight)
            steps = (ranges.quant_max - ranges.quant_min) / 2
            widened = torch.maximum(ranges.max_val, least.max() * steps if ranges.max_val.ndim == 0 else least * steps)
            ranges.max_val.copy_(
                torch.where(widened > torch.maximum(ranges.max_val, -ranges.min_val), widened, ranges.max_val)
            )


def range_warnings(module: GraphModule) -> tuple[str, ...]:
    """One line for each range that costs accuracy, with the layer that it belongs to."""
    return tuple(line for node, observer in observed(module) for line in _lines(node, observer))


def _lines(node: Node, observer: torch.nn.Module) -> Iterator[str]:
    if isinstance(observer, pt2e.DerivedObserverOrFakeQuantize):
        return
    ranges = _ranges(observer)
    low, high = ranges.min_val, ranges.max_val
    if node.op == "get_attr":
        dead = int(((low == 0) & (high == 0)).sum())
        if dead:
            yield f"{node.target}: {dead} of {low.numel()} channels are all zero"
        return
    name = module_path(node) or node.name
    if not bool(low <= high):
        yield f"{name}: never reached by calibration"
    elif bool(low == high):
        yield f"{name}: constant at {float(low):.4g} over all calibration data"
    else:
        inner = observer.range() if isinstance(observer, observers.Watched) else (low, high)
        yield from _shape_lines(name, observer, *map(float, inner))


def _shape_lines(name: str, observer: torch.nn.Module, low: float, high: float) -> Iterator[str]:
    scale, _ = observer.calculate_qparams()
    steps = (high - low) / float(scale)
    if steps < LEAST_STEPS:
        yield (
            f"{name}: values lie in {low:.4g} to {high:.4g}, far from 0: only {steps:.0f} of 255 steps are used; "
            "subtract the offset in the model, or keep the layer float"
        )
    deviation = observer.deviation() if isinstance(observer, observers.Watched) else 0.0
    if deviation and high - low > MOST_DEVIATIONS * deviation:
        yield (
            f"{name}: outliers: the range {low:.4g} to {high:.4g} is {(high - low) / deviation:.0f} standard "
            "deviations wide; remove them from the calibration data, or set quantization.ranges: percentile"
        )


def stored(module: GraphModule, node: Node) -> torch.Tensor:
    """The tensor that a get_attr node names, without gradient."""
    value: object = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value.detach()
