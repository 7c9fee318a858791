"""Trying a rule by itself, in a test of the user's own: does it match, and does it give what its pattern gives?"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from edgeopt.errors import first_line
from edgeopt.passes import in_place, no_ops
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.rules import FusionRule, TensorInput, name_of
from edgeopt.passes.rules_run import as_pass
from edgeopt.passes.rules_trace import (
    example_scalars,
    example_shape,
    example_sizes,
    line_of,
)
from edgeopt.program.tracing import plain_attention, quiet
from edgeopt.spec.profile import Profile, load_profile

_LEADING = ((2, 3), (4,), ())  # what '...' stands for in one call after another
_TIMES_NOISE = 4.0


@dataclass(frozen=True)
class Trial:
    """One call. Errors are against the pattern in float64: absolute, and relative to its largest value."""

    label: str
    max_abs_error: float
    max_rel_error: float


@dataclass(frozen=True)
class Checked:
    """What `check_rule` found: the places replaced in the module, the calls, and why places were left alone."""

    places: int
    trials: tuple[Trial, ...]
    declined: tuple[str, ...]


def check_rule(
    rule: FusionRule,
    module: nn.Module | None = None,
    inputs: Sequence[torch.Tensor] = (),
    *,
    places: int | None = None,
    dynamic_shapes: Any = None,
    sizes: Sequence[Mapping[str, int]] = (),
    tolerance: float = 1e-4,
    seed: int = 0,
    profile: str = "x86-cpu",
) -> Checked:
    """Try a rule on its own pattern, and on a module where one is given; AssertionError says what is wrong.

    The replacement is run against every spelling of the pattern on random tensors of the rule's example sizes and of
    each of `sizes` ({dimension: size}), and each spelling must be found in a graph of itself, with fixed and with
    dynamic sizes. `module` is exported with `inputs` (and `dynamic_shapes`, as torch.export takes them): the rule
    must match there, at `places` places where that is given, and the result must give what the module gives.
    `tolerance` is of the pattern's largest value, or of 1 where that is smaller; an error within four times the
    pattern's own float32 noise passes. `profile` is what the rule's check sees. Raises ProjectError that names file
    and line where the rule's functions cannot be traced.
    """
    step = as_pass("checked", rule)
    seen = load_profile(profile)
    trials = []
    for number, chosen in enumerate((example_sizes(rule, 0), example_sizes(rule, 1), *sizes)):
        known = {**example_sizes(rule, 0), **chosen}
        for scalars in (example_scalars(rule, 0), example_scalars(rule, 1)) if rule.scalars else ({},):
            trials += _against_patterns(rule, known, scalars, _LEADING[number % 3], tolerance, seed + number)
    for spelling in rule.patterns:
        for dynamic in (False, True):
            label = f"in a graph of itself with {'dynamic' if dynamic else 'fixed'} sizes"
            exported = _pattern_graph(rule, spelling, dynamic)
            if exported is None:
                continue
            done, trial = _in_graph(step.run, *exported, seen, tolerance, label)
            _require(done.count == 1, f"{_at(spelling)} is not found {label}", done)
            trials.append(trial)
    if module is None:
        return Checked(0, tuple(trials), ())
    _require(not module.training, f"{type(module).__name__} is in training mode: call eval() first")
    given = tuple(inputs)
    graph = _exported(module, given, dynamic_shapes)
    done, trial = _in_graph(step.run, graph, given, seen, tolerance, f"in {type(module).__name__}")
    _require(done.count > 0, f"the rule matches nowhere in {type(module).__name__}", done)
    _require(places in (None, done.count), f"the rule matches {done.count} places in the module, not {places}", done)
    return Checked(done.count, (*trials, trial), done.declined)


def _require(holds: bool, message: str, done: Changed | None = None) -> None:
    if not holds:
        raise AssertionError("\n  ".join([message, *(done.declined if done else ())]))


def _at(function: Callable[..., Any]) -> str:
    return f"'{name_of(function)}' ({line_of(function)})"


def _against_patterns(
    rule: FusionRule, sizes: Mapping[str, int], scalars: Mapping[str, Any], leading: tuple[int, ...],
    tolerance: float, seed: int,
) -> list[Trial]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(given, example_shape(given, sizes, leading), generator) for name, given in rule.tensors.items()
    }
    label = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
    label += "".join(f", {name}={value}" for name, value in scalars.items())
    with torch.no_grad():
        given = _called(rule.replacement, tensors, scalars, label)
        found = []
        for spelling in rule.patterns:
            wanted = _called(spelling, tensors, scalars, label)
            double = {n: v.double() if v.dtype.is_floating_point else v for n, v in tensors.items()}
            try:
                truth = _tuple(spelling(**double, **scalars))
            except Exception:  # an operator that has no float64, or a constant of another dtype inside
                truth = wanted
            found.append(_trial(f"{name_of(spelling)} on {label}", truth, wanted, given, tolerance, rule))
    return found


def _called(
    function: Callable[..., Any], tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], label: str
) -> tuple[torch.Tensor, ...]:
    copies = {name: value.clone() for name, value in tensors.items()}
    try:
        returned = _tuple(function(**copies, **scalars))
    except Exception as why:
        where = line_of(function, why)
        raise AssertionError(
            f"'{name_of(function)}' fails on {label}: {type(why).__name__}: {first_line(why)} ({where})"
        ) from why
    for name, value in tensors.items():
        _require(torch.equal(copies[name], value), f"{_at(function)} writes to its input '{name}'")
    return returned


def _trial(
    label: str, truth: tuple, wanted: tuple, given: tuple, tolerance: float, rule: FusionRule | None = None
) -> Trial:
    who = _at(rule.replacement) if rule else "the module with the rule applied"
    worst_abs = worst_rel = 0.0
    for number, (exact, own, value) in enumerate(zip(truth, wanted, given, strict=True)):
        _require(
            own.dtype == value.dtype and own.shape == value.shape,
            f"{who} gives {value.dtype} {list(value.shape)} where {own.dtype} {list(own.shape)} is wanted: {label}",
        )
        error, noise, largest = _error(exact, value), _error(exact, own), _largest(exact)
        worst_abs = max(worst_abs, error)
        worst_rel = max(worst_rel, error / largest if largest else error)
        _require(
            error <= max(tolerance * max(1.0, largest), _TIMES_NOISE * noise),
            f"{who} is off by {error:.3g} in output {number}, whose largest value is {largest:.3g}: {label}",
        )
    return Trial(label, worst_abs, worst_rel)


def _error(exact: torch.Tensor, value: torch.Tensor) -> float:
    """The largest difference; inf where only one of the two is NaN, or infinite."""
    a, b = exact.double(), value.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    return float(difference.max()) if difference.numel() else 0.0


def _largest(exact: torch.Tensor) -> float:
    finite = exact.double().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _random(given: TensorInput, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    low, high = given.values
    dtype = given.dtype or torch.float32
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)


def _pattern_graph(
    rule: FusionRule, spelling: Callable[..., Any], dynamic: bool
) -> tuple[GraphModule, tuple[torch.Tensor, ...]] | None:
    """The pattern exported by itself, as a model that holds nothing else would be, and its inputs.

    Dynamic are the named dimensions that torch.export can keep so, as math.sqrt of a size fixes it; None without any.
    """
    generator = torch.Generator().manual_seed(0)
    sizes, scalars = example_sizes(rule, 0), example_scalars(rule, 0)
    tensors = {
        name: _random(given, example_shape(given, sizes, _LEADING[0]), generator)
        for name, given in rule.tensors.items()
    }
    given = tuple(tensors.values())
    module = _Called(spelling, list(tensors), scalars)
    if not dynamic:
        return _exported(module, given, None), given
    axes = {name: torch.export.Dim(f"axis_{i}", min=2) for i, name in enumerate(rule.sizes)}
    while axes:
        try:
            return _exported(module, given, (tuple(_dynamic(t, axes) for t in rule.tensors.values()),)), given
        except Exception as why:
            fixed = re.findall(r"^ *(axis_\d+) = ", str(why), re.MULTILINE)  # torch's own words: what to fix
            left = {name: axis for name, axis in axes.items() if axis.__name__ not in fixed}
            axes = left if len(left) < len(axes) else {}
    return None


def _dynamic(given: TensorInput, axes: Mapping[str, Any]) -> dict[int, Any]:
    rank = len(given.shape) + (len(_LEADING[0]) - 1 if ... in given.shape else 0)
    return {
        rank - len(given.shape) + i: axes[size] for i, size in enumerate(given.shape) if size in axes
    }  # fmt: skip


class _Called(nn.Module):
    def __init__(self, function: Callable[..., Any], names: list[str], scalars: Mapping[str, Any]):
        super().__init__()
        self.function, self.names, self.scalars = function, names, dict(scalars)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _tuple(self.function(**dict(zip(self.names, tensors, strict=True)), **self.scalars))


def _exported(module: nn.Module, inputs: tuple[torch.Tensor, ...], dynamic_shapes: Any) -> GraphModule:
    with torch.no_grad(), plain_attention(), quiet():
        found = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
        return found.module(check_guards=False)


def _in_graph(
    run: Callable[[Context], Changed], graph: GraphModule, inputs: tuple[torch.Tensor, ...],
    profile: Profile, tolerance: float, label: str,
) -> tuple[Changed, Trial]:  # fmt: skip
    """The rule on a graph prepared as it is in a build, and the graph's outputs against those before."""
    with torch.no_grad():
        wanted = tree_leaves(graph(*(x.clone() for x in inputs)))
        for prepare in (in_place.run, no_ops.run):
            prepare(Context(graph, profile))
        done = run(Context(graph, profile))
        graph.graph.lint()
        graph.recompile()
        given = tree_leaves(graph(*(x.clone() for x in inputs)))
    return done, _trial(label, tuple(wanted), tuple(wanted), tuple(given), tolerance)


def _tuple(returned: Any) -> tuple[torch.Tensor, ...]:
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)
