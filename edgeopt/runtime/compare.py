"""How far a candidate's outputs are from the reference. All sums are taken in float64.

Where the reference is NaN or infinite, a candidate that gives the same value is right. One that gives NaN or
infinity where the reference is finite (or the other way round) has an SQNR of -inf and errors of inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgeopt.errors import DataError
from edgeopt.spec.manifest import Tolerance

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Error:
    """The error of one output over some calls.

    `sqnr_db`: 10 log10(sum r^2 / sum (r - x)^2), inf where equal. `max_abs`: max |r - x| / max(1, max |r|),
    as spec.manifest.Tolerance defines it. `max_rel`: max |r - x| / max |r|, 0 where both are zero and inf where
    only the reference is. `mismatches`: elements of an integer or bool output that differ;
    such outputs are compared exactly and have sqnr_db inf or -inf.
    """

    sqnr_db: float
    max_abs: float
    max_rel: float = 0.0
    mismatches: int = 0

    @property
    def exact(self) -> bool:
        return self.sqnr_db == math.inf


def sqnr_db(reference: np.ndarray, value: np.ndarray) -> float:
    """Signal to quantization-noise ratio in dB, 10 log10(sum r^2 / sum (r - x)^2); inf where equal."""
    return output_error([reference], [value]).sqnr_db


def top1_agreement(reference: np.ndarray, value: np.ndarray) -> float:
    """The fraction of samples, shape (n, classes, ...), whose largest class (axis 1) is the same."""
    _same_shape(reference, value)
    if reference.ndim < 2 or reference.size == 0:
        raise DataError(
            f"an output of shape {reference.shape} has no classes",
            todo="set 'classifier: false' in the project",
        )
    return float((np.argmax(reference, axis=1) == np.argmax(value, axis=1)).mean())


def agreement(references: Sequence[np.ndarray], values: Sequence[np.ndarray], axis: int | None = None) -> float:
    """The share of choices that are equal, over all calls; along `axis` (as of a top-k) in whatever order."""
    equal = count = 0
    for reference, value in zip(references, values, strict=True):
        _same_shape(reference, value)
        if axis is not None:
            wanted, found = np.moveaxis(reference, axis, -1), np.moveaxis(value, axis, -1)
            equal += int((wanted[..., :, None] == found[..., None, :]).any(-1).sum())
        else:
            equal += int((reference == value).sum())
        count += reference.size
    return equal / count if count else 1.0


def output_error(references: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> Error:
    """The Error of one output over the calls: energies are summed over all of them, the maximum is of all."""
    signal = noise = largest = error = 0.0
    mismatches = 0
    for reference, value in zip(references, values, strict=True):
        _same_shape(reference, value)
        if reference.dtype.kind in "iub":
            mismatches += int((reference != value).sum())
        r, x = _float64(reference, value)
        difference = _difference(r, x)
        finite = np.where(np.isfinite(r), r, 0)
        signal += float((finite * finite).sum())
        noise += float((difference * difference).sum())
        largest = max(largest, float(np.abs(finite).max(initial=0)))
        error = max(error, float(difference.max(initial=0)))
    return Error(
        sqnr_db=-math.inf if mismatches else _ratio_db(signal, noise),
        max_abs=error / max(1.0, largest),
        max_rel=error / largest if largest else (math.inf if error else 0.0),
        mismatches=mismatches,
    )


def output_errors(references: Sequence[Tensors], values: Sequence[Tensors]) -> dict[str, Error]:
    """The Error of every output by name, over calls that are given in the same order."""
    names = list(references[0]) if references else []
    for given in values:
        if lacking := [name for name in names if name not in given]:
            raise DataError(f"there is no output '{lacking[0]}'", todo="build the artifact again")
    return {n: output_error([r[n] for r in references], [v[n] for v in values]) for n in names}


def broken(name: str, error: Error) -> str | None:
    """Why an output cannot be right within any tolerance, or None."""
    if error.mismatches:
        return f"output '{name}': {error.mismatches} integers differ"
    if math.isinf(error.max_abs):
        return f"output '{name}' is NaN or infinite where the reference is not, or the other way round"
    return None


def reasons_against(errors: Mapping[str, Error], tolerance: Tolerance) -> list[str]:
    """Why the outputs are not within `tolerance`, an entry for each output; [] where they are."""
    reasons = []
    for name, error in errors.items():
        if reason := broken(name, error):
            reasons.append(reason)
        elif tolerance.sqnr_db is not None and error.sqnr_db < tolerance.sqnr_db:
            reasons.append(f"output '{name}': SQNR {error.sqnr_db:.1f} dB, at least {tolerance.sqnr_db:g} is asked")
        elif tolerance.max_abs is not None and error.max_abs > tolerance.max_abs:
            reasons.append(f"output '{name}': error {error.max_abs:.3g}, at most {tolerance.max_abs:g} is allowed")
    return reasons


def _ratio_db(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def _difference(r: np.ndarray, x: np.ndarray) -> np.ndarray:
    """|r - x|; 0 where both are NaN or the same infinity, inf where only one of them is finite."""
    both = np.isfinite(r) & np.isfinite(x)
    same = both | (np.isnan(r) & np.isnan(x)) | (r == x)
    return np.where(both, np.abs(np.where(both, r, 0) - np.where(both, x, 0)), np.where(same, 0.0, np.inf))


def _float64(reference: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _same_shape(reference, value)
    return np.asarray(reference, np.float64), np.asarray(value, np.float64)


def _same_shape(reference: np.ndarray, value: np.ndarray) -> None:
    if reference.shape != value.shape:
        raise DataError(
            f"an output has shape {value.shape}, the reference {reference.shape}",
            todo="look for an axis that the model fixes although the project declares it dynamic",
        )
