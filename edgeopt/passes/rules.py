"""Fusion rules of the user's own: what a rule is made of, checked when it is written.

A rule says that some operators may be replaced by others, as two plain functions over tensors. Both are traced (see
rules_trace), the pattern is looked for in the graph (rules_match), and what is found is replaced, or left alone with
the reason (rules_run). A project names its rules; each runs as the pass `rule:NAME` and is checked and dropped like
any other pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch

Shape = tuple[int | str | EllipsisType, ...]
_STEP = 4  # sizes of named dimensions are multiples of it where none are given, so that a function may split them


@dataclass(frozen=True)
class TensorInput:
    """A tensor that the pattern takes: see `tensor`."""

    shape: Shape
    dtype: torch.dtype | None
    values: tuple[float, float]


@dataclass(frozen=True)
class ScalarInput:
    """A number that the pattern takes: see `scalar`."""

    examples: tuple[int | float, int | float]


def tensor(
    *shape: int | str | EllipsisType, dtype: torch.dtype | None = None, values: tuple[float, float] = (-2.0, 2.0)
) -> TensorInput:
    """A tensor that a pattern takes.

    A dimension is a size, or a name: dimensions of one name have one size. `...` as the first stands for any number
    of dimensions. `dtype` None is any floating dtype. `values` is the range that `check_rule` draws from.
    Raises TypeError for what is no shape.
    """
    for i, size in enumerate(shape):
        if size is ... and i:
            raise TypeError(f"'...' may only be the first of a tensor's dimensions, in {shape}")
        if size is not ... and not isinstance(size, int | str) or isinstance(size, bool):
            raise TypeError(f"{size!r} in {shape} is neither a size, the name of a dimension, nor '...'")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is no torch dtype, such as torch.float16")
    return TensorInput(tuple(shape), dtype, values)


def scalar(example: int | float, other: int | float) -> ScalarInput:
    """A number that a pattern takes, and its replacement receives: whatever stands at that place of the model.

    Two values that it may have tell us where the pattern uses it. Raises TypeError unless they are two different
    numbers of one type.
    """
    if type(example) is not type(other) or type(example) not in (int, float) or example == other:
        raise TypeError(f"scalar({example!r}, {other!r}): give two different numbers of one type, int or float")
    return ScalarInput((example, other))


@dataclass(frozen=True)
class FusionRule:
    """A rule as `rule` makes it; the functions of `patterns` are several spellings of one thing."""

    patterns: tuple[Callable[..., Any], ...]
    replacement: Callable[..., Any]
    inputs: Mapping[str, TensorInput | ScalarInput]
    check: Callable[[Any], str | None] | None = None
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, TensorInput]:
        return {name: given for name, given in self.inputs.items() if isinstance(given, TensorInput)}

    @property
    def scalars(self) -> dict[str, ScalarInput]:
        return {name: given for name, given in self.inputs.items() if isinstance(given, ScalarInput)}


def rule(
    *,
    pattern: Callable[..., Any] | Sequence[Callable[..., Any]],
    replacement: Callable[..., Any],
    inputs: Mapping[str, Sequence[int | str | EllipsisType] | TensorInput | ScalarInput],
    check: Callable[[Any], str | None] | None = None,
    sizes: Mapping[str, tuple[int, int]] | None = None,
) -> FusionRule:
    """A fusion rule: where the operators of `pattern` stand in a model, those of `replacement` take their place.

    `pattern`: a function of tensors, or several where models spell one thing in several ways. `replacement`: a
    function of the same parameters that returns tensors of the same dtypes and shapes. `inputs`: for each parameter
    a shape (see `tensor`) or a `scalar`. `check(match)`: the reason why the rule may not be applied at a place, or
    None. `sizes`: for a named dimension two sizes that the functions take, where 4, 8, 12, ... are none.
    Raises TypeError or ValueError for what is no rule.
    """
    patterns = (pattern,) if callable(pattern) else tuple(pattern)
    if not patterns or not all(callable(p) for p in (*patterns, replacement)):
        raise TypeError("pattern and replacement are functions of tensors")
    if check is not None and not callable(check):
        raise TypeError(f"check={check!r} is no function")
    found = {name: _input(name, given) for name, given in dict(inputs).items()}
    for function in (*patterns, replacement):
        _require_parameters(function, found)
    if len({given.examples for given in found.values() if isinstance(given, ScalarInput)}) < sum(
        isinstance(given, ScalarInput) for given in found.values()
    ):
        raise ValueError("two scalars have the same two examples, so that they could not be told apart")
    if not any(isinstance(given, TensorInput) for given in found.values()):
        raise ValueError("a rule takes at least one tensor")
    return FusionRule(patterns, replacement, found, check, _sizes(found, sizes or {}))


def _input(name: str, given: Any) -> TensorInput | ScalarInput:
    if isinstance(given, TensorInput | ScalarInput):
        return given
    if isinstance(given, list | tuple):
        return tensor(*given)
    raise TypeError(f"inputs[{name!r}] = {given!r} is no shape such as ('batch', 8), no tensor(...) and no scalar(...)")


def _require_parameters(function: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters)
    if sorted(parameters) != sorted(inputs):
        raise TypeError(
            f"{name_of(function)}({', '.join(parameters)}) must take the rule's inputs: {', '.join(inputs)}"
        )


def _sizes(inputs: Mapping[str, Any], given: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """For each named dimension its size in the one and in the other trace: all are different in either."""
    shapes = [value.shape for value in inputs.values() if isinstance(value, TensorInput)]
    names = list(dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str)))
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"sizes: no input has a dimension '{unknown[0]}'; they have {', '.join(names) or 'no names'}")
    sizes = {}
    for i, name in enumerate(names):
        pair = given.get(name, (_STEP * (i + 1), _STEP * ((i + 1) % max(2, len(names)) + 1)))
        if len(tuple(pair)) != 2 or pair[0] == pair[1] or not all(type(size) is int and size > 0 for size in pair):
            raise ValueError(f"sizes[{name!r}] = {pair!r}: give two different sizes")
        sizes[name] = (pair[0], pair[1])
    return sizes


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
