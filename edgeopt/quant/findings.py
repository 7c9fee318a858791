"""What calibrated observers show: ranges that cost accuracy, dead channels, biases that an int32 cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.program.nodes import module_path
from edgeopt.program.patterns import aten_name
from edgeopt.quant import observers, pt2e

MOST_DEVIATIONS = 150  # a normal distribution of a million values is 10 wide
LEAST_STEPS = 32  # fewer steps over the values seen: more than three of eight bits lie where no value is


def observed(module: GraphModule) -> Iterator[tuple[Node, torch.nn.Module]]:
    """(the node that is observed, its observer) in graph order, each observer once; fake-quantizers give theirs."""
    seen = set()
    for node, observer in observations(module):
        if id(observer) not in seen:
            seen.add(id(observer))
            yield node, observer


def observations(module: GraphModule) -> Iterator[tuple[Node, torch.nn.Module]]:
    """The same for every place: a chain of layout operators has one observer at several."""
    for node in module.graph.nodes:
        if node.op == "call_module":
            observer = module.get_submodule(node.target)
            if isinstance(observer, pt2e.ObserverBase | pt2e.FakeQuantizeBase):
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
            *sources, weight = observer.obs_or_fqs
            bias = stored.tensor(module, node).abs()
            source_scale = sources[0].calculate_qparams()[0] if sources else 1.0  # bytes are integers of scale 1
            least = bias / (source_scale * 2.0**30)
            ranges = _ranges(weight)
            steps = (ranges.quant_max - ranges.quant_min) / 2
            widened = torch.maximum(ranges.max_val, least.max() * steps if ranges.max_val.ndim == 0 else least * steps)
            ranges.max_val.copy_(
                torch.where(widened > torch.maximum(ranges.max_val, -ranges.min_val), widened, ranges.max_val)
            )


def range_warnings(module: GraphModule, inputs: Sequence[str] = ()) -> tuple[str, ...]:
    """One line for each range that costs accuracy, with its layer; `inputs` are the names of the inputs."""
    return tuple(line for node, observer in observed(module) for line in _lines(node, observer, inputs))


def layer_name(node: Node, inputs: Sequence[str] = ()) -> str:
    """What messages call a value by: the module that made it, of a weight the module that uses it, the input's name."""
    if node.op == "placeholder" and inputs:
        given = [n for n in node.graph.nodes if n.op == "placeholder"]
        return inputs[given.index(node)]
    if node.op != "get_attr":
        return module_path(node) or node.name
    users = list(node.users)
    while users and users[0].op == "call_module":  # its observers
        users = list(users[0].users)
    return (module_path(users[0]) if users else "") or str(node.target)


def steps_used(observer: torch.nn.Module) -> float:
    """How many of the integers the values seen cover, those left out that lie between them and 0."""
    low, high = _not_clipped(observer)
    scale, _ = observer.calculate_qparams()
    return (high - low) / float(scale)


def off_centre(observer: torch.nn.Module) -> str | None:
    """Where an activation's values lie, and how many steps they use, if few; None for ranges that are well used."""
    ranges = _ranges(observer)
    if not bool(ranges.min_val < ranges.max_val) or steps_used(observer) >= LEAST_STEPS:
        return None
    low, high = _not_clipped(observer)
    return f"values lie in {low:.4g} to {high:.4g}, far from 0: only {steps_used(observer):.0f} of 255 steps are used"


def _not_clipped(observer: torch.nn.Module) -> tuple[float, float]:
    ranges = _ranges(observer)
    low, high = observer.range() if isinstance(observer, observers.Watched) else (ranges.min_val, ranges.max_val)
    return max(float(low), float(ranges.min_val)), min(float(high), float(ranges.max_val))


def _lines(node: Node, observer: torch.nn.Module, inputs: Sequence[str]) -> Iterator[str]:
    if isinstance(observer, pt2e.DerivedObserverOrFakeQuantize):
        return
    if node.op == "get_attr":
        if _is_table(node):
            return  # a row of zeros is the padding's
        yield from _weight_lines(layer_name(node), stored.tensor(node.graph.owning_module, node), observer)
    else:
        yield from value_lines(layer_name(node, inputs), observer)


def value_lines(name: str, observer: torch.nn.Module) -> Iterator[str]:
    """What the calibrated observer of an activation shows, as lines that begin with `name`."""
    low, high = _ranges(observer).min_val, _ranges(observer).max_val
    if not bool(low <= high):
        yield f"{name}: never reached by calibration"
    elif bool(low == high):
        yield f"{name}: constant at {float(low):.4g} over all calibration data"
    else:
        if where := off_centre(observer):
            yield f"{name}: {where}; subtract the offset in the model, or keep the layer float"
        yield from _outlier_lines(name, observer)


def _is_table(node: Node) -> bool:
    """Whether the stored tensor is looked up only, behind its observers."""
    readers = [reader for user in node.users for reader in (user.users if user.op == "call_module" else (user,))]
    return bool(readers) and all(aten_name(reader) == "embedding" for reader in readers)


def _weight_lines(name: str, weight: torch.Tensor, observer: torch.nn.Module) -> Iterator[str]:
    axis = getattr(_ranges(observer), "ch_axis", 0)
    largest = weight.detach().abs().movedim(axis, 0).flatten(1).amax(1) if weight.ndim > 1 else weight.abs()
    dead = int((largest == 0).sum())
    if dead:
        yield f"{name}: {dead} of {len(largest)} channels are all zero"
    scale, _ = observer.calculate_qparams()
    lost = int(((largest < scale / 2) & (largest > 0)).sum())
    if scale.numel() == 1 and lost:
        yield (
            f"{name}: {lost} of {len(largest)} channels round to zero at one scale for all of them; set "
            "quantization.per_channel: on"
        )


def _outlier_lines(name: str, observer: torch.nn.Module) -> Iterator[str]:
    low, high = _not_clipped(observer)
    deviation = observer.deviation() if isinstance(observer, observers.Watched) else 0.0
    if deviation and high - low > MOST_DEVIATIONS * deviation:
        yield (
            f"{name}: outliers: the range {low:.4g} to {high:.4g} is {(high - low) / deviation:.0f} standard "
            "deviations wide; remove them from the calibration data, or set quantization.ranges: percentile (or "
            "entropy)"
        )
