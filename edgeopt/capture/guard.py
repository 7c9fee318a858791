"""What a captured program must equal the user's model in: other sizes of each axis, other values, repeated calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgeopt.capture.declined import first_line
from edgeopt.capture.eager import Answer
from edgeopt.capture.inputs import batch_axis
from edgeopt.errors import CaptureError, ModelError
from edgeopt.program import Signature, graph
from edgeopt.runtime.compare import output_error
from edgeopt.spec.manifest import TensorSpec

MAX_SCALED_ERROR = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2}
_CAPPED_AT = 8  # largest size tried of an axis whose opt is small; twice opt where that is more
_BATCH_CAPPED_AT = 4  # of inputs so large that a larger batch takes long
_LARGE_ELEMENTS = 1 << 16


class Model(Protocol):
    """The user's model as it is, of whatever kind."""

    def answer(self, arrays: dict[str, np.ndarray]) -> Answer: ...


@dataclass(frozen=True)
class Probe:
    """Inputs, the user's model's answer to them, and in words what they try."""

    label: str
    inputs: dict[str, np.ndarray]
    answer: Answer
    sizes: dict[str, int]


def probes(model: Model, signature: Signature, seed: int) -> tuple[list[Probe], list[str]]:
    """The user's answers at up to three sizes of each dynamic axis and for other values, and notes.

    Raises ModelError where the model itself fails at a size that the project declares.
    """
    found, notes = [], []
    base_sizes = sizes_to_vary(signature)
    base = graph.synthetic(signature, base_sizes, seed)
    found.append(Probe("the example sizes", base, model.answer(base), base_sizes))
    for axis, size, required in _other_sizes(signature, base_sizes):
        sizes = {**base_sizes, axis: size}
        inputs = graph.synthetic(signature, sizes, seed + 1)
        try:
            found.append(Probe(f"{axis}={size}", inputs, model.answer(inputs), sizes))
        except ModelError as why:
            if required:
                raise ModelError(
                    f"the model fails at {axis}={size}, which the project declares: {why.what}", where=why.where,
                    todo=f"correct the model, or the range of 'axes.{axis}'",
                ) from why  # fmt: skip
            notes.append(f"the model does not take every size of {axis}: it fails at {size}")
    for label, inputs in _other_values(signature, base, seed):
        try:
            found.append(Probe(label, inputs, model.answer(inputs), base_sizes))
        except ModelError:
            continue  # such values are no valid input of this model
    return found, notes


def inputs_to_try(signature: Signature, seed: int) -> list[dict[str, np.ndarray]]:
    """The inputs of `probes` alone."""
    base_sizes = sizes_to_vary(signature)
    base = graph.synthetic(signature, base_sizes, seed)
    sizes = [{**base_sizes, axis: size} for axis, size, _ in _other_sizes(signature, base_sizes)]
    values = [inputs for _, inputs in _other_values(signature, base, seed)]
    return [base, *(graph.synthetic(signature, each, seed + 1) for each in sizes), *values]


def largest(model: Model, signature: Signature, seed: int) -> list[Probe]:
    """The user's answers with one axis after the other at its largest size, which `probes` may leave out as costly."""
    found = []
    base_sizes = sizes_to_vary(signature)
    for name, axis in signature.axes.items():
        sizes = {**base_sizes, name: axis.max}
        inputs = graph.synthetic(signature, sizes, seed + 3)
        found.append(Probe(f"{name}={axis.max}", inputs, model.answer(inputs), sizes))
    return found


def output_specs(signature: Signature, tried: list[Probe]) -> tuple[TensorSpec, ...]:
    """Each output's name, dtype and shape: an axis by its name where its size is the axis's in every probe.

    A size that varies otherwise is `dim_0`, `dim_1`, ... Raises CaptureError where the structure varies.
    """
    for probe in tried:
        if probe.answer.structure != tried[0].answer.structure:
            raise CaptureError(
                f"the structure of the outputs changes with {probe.label}", where="the model's forward",
                todo="return the same tuple, dict or list at every call, and sizes that vary as tensors",
            )  # fmt: skip
    unknown = 0
    specs = []
    for name, first in tried[0].answer.outputs.items():
        shapes = [probe.answer.outputs[name].shape for probe in tried]
        if len({len(shape) for shape in shapes}) > 1:
            raise CaptureError(
                f"the output '{name}' has {len(shapes[0])} dimensions for some inputs and others for some",
                where="the model's forward", todo="return the same number of dimensions at every call",
            )  # fmt: skip
        shape: list[int | str] = []
        for sizes in zip(*shapes, strict=True):
            named = _axis_of(sizes, signature, tried)
            if named is None:
                named, unknown = f"dim_{unknown}", unknown + 1
            shape.append(named)
        specs.append(TensorSpec(name=name, dtype=first.dtype.name, shape=tuple(shape)))
    return tuple(specs)


def _axis_of(sizes: tuple[int, ...], signature: Signature, tried: list[Probe]) -> int | str | None:
    if len(set(sizes)) == 1:
        return sizes[0]
    for axis in signature.axes:
        if all(size == probe.sizes[axis] for size, probe in zip(sizes, tried, strict=True)):
            return axis
    return None


def disagreement(
    run: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], tried: list[Probe], noise: float
) -> str | None:
    """Why `run` is not the user's model, or None. The first probe is repeated at the end, to find kept state."""
    for probe in [*tried, tried[0]]:
        try:
            outputs = run(probe.inputs)
        except Exception as why:  # a captured program may fail in any way that torch knows
            return f"with {probe.label} it fails: {first_line(why)}"
        _, reason = difference(probe.answer, Answer(outputs, probe.answer.structure, False), noise)
        if reason:
            return f"with {probe.label} it differs from eager: {reason}"
    return None


def difference(reference: Answer, other: Answer, noise: float = 0.0) -> tuple[float, str | None]:
    """The largest scaled difference of two answers, and why they are not equal, or None.

    Floats may differ by `MAX_SCALED_ERROR` of their dtype (or ten times the model's own noise) times
    max(1, max |reference|); other dtypes, NaN and infinity must be equal.
    """
    if reference.structure != other.structure:
        return math.inf, "the structure of the outputs changes"
    worst = 0.0
    for name, wanted in reference.outputs.items():
        got = other.outputs[name]
        if wanted.shape != got.shape or wanted.dtype != got.dtype:
            return math.inf, f"'{name}' is {got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        error = _error(wanted, got)
        worst = max(worst, error)
        if error > max(MAX_SCALED_ERROR.get(wanted.dtype.name, 0.0), 10 * noise):
            return worst, f"'{name}' is off by {error:.3g} of its largest value"
    return worst, None


def _error(reference: np.ndarray, value: np.ndarray) -> float:
    """The scaled largest difference; inf where integers differ or only one of the two is finite."""
    error = output_error([reference], [value])
    return math.inf if error.mismatches else error.max_abs


def sizes_to_vary(signature: Signature) -> dict[str, int]:
    """The sizes that one axis at a time is varied from: the example's, with a batch of 2, which costs little."""
    sizes = graph.sizes(signature, "example")
    batch = batch_axis(signature)
    if batch is not None:
        axis = signature.axes[batch]
        sizes[batch] = max(axis.min, min(axis.max, 2))
    return sizes


def _other_sizes(signature: Signature, base: dict[str, int]) -> list[tuple[str, int, bool]]:
    """(axis, size, whether the model must take it): the smallest, one between, and a large one of each axis.

    Sizes keep to the common divisor of min, opt and max, since a model may take multiples of 32 only.
    """
    batch = batch_axis(signature)
    found = []
    for name, axis in signature.axes.items():
        step = math.gcd(axis.min, axis.opt, axis.max)
        if name == batch:
            cap = _BATCH_CAPPED_AT if _elements(signature, base) > _LARGE_ELEMENTS else _CAPPED_AT
        else:
            cap = max(_CAPPED_AT, 2 * axis.opt)
        large = min(axis.max, axis.min + max(0, cap - axis.min) // step * step)
        between = axis.min + (large - axis.min) // (2 * step) * step
        for size in dict.fromkeys((axis.min, between, large)):
            if size != base[name]:
                found.append((name, size, size in (axis.min, axis.opt, axis.max)))
    return found


def _elements(signature: Signature, sizes: dict[str, int]) -> int:
    return sum(math.prod(sizes[s] if isinstance(s, str) else s for s in spec.shape) for spec in signature.inputs)


def _other_values(
    signature: Signature, base: dict[str, np.ndarray], seed: int
) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Inputs of the base's shapes with other values, within the ranges that the project declares."""
    rng = np.random.default_rng(seed + 2)
    return [
        ("mirrored values", {k: np.asarray(_mirrored(signature, k, v)) for k, v in base.items()}),
        ("the lowest values", {k: _filled(signature, k, v, 0) for k, v in base.items()}),
        ("the highest values", {k: _filled(signature, k, v, 1) for k, v in base.items()}),
        ("values of both signs", {k: _both_signs(signature, k, v, rng) for k, v in base.items()}),
    ]


def _mirrored(signature: Signature, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "b":
        return ~array
    low, high = signature.values.get(name, (0, 0) if array.dtype.kind == "f" else (0, 1))
    return (np.asarray(low + high).astype(array.dtype) - array).astype(array.dtype)


def _filled(signature: Signature, name: str, array: np.ndarray, end: int) -> np.ndarray:
    return np.full_like(array, signature.values.get(name, (0, 1))[end])


def _both_signs(signature: Signature, name: str, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if array.dtype.kind != "f" or name in signature.values:
        return array
    return np.asarray(rng.normal(0, 2, array.shape)).astype(array.dtype)
