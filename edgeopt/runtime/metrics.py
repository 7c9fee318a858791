"""A metric as `evaluate` gives it, and its confidence interval where the samples that it comes from are known.

A plain number says nothing of its samples. It gets an interval only where it is plainly a proportion of the samples
that evaluate asked for; else evaluate may say more: (value, samples) for a proportion, or the scores of the samples,
whose mean is the metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeopt.errors import DataError
from edgeopt.spec.report import Interval

_Z = 1.959964  # of a normal distribution 95 % lie within so many deviations
_RESAMPLES = 1000
_MOST_RESAMPLED = 10_000  # scores; of more the mean is normal
_WHOLE = 1e-3  # how far a proportion times its samples may lie from a whole number: float32 sums, rounded figures


@dataclass(frozen=True)
class Metric:
    """`value`, and what is known of its samples: their number for a proportion, or `scores` whose mean it is."""

    value: float
    samples: int | None = None
    scores: np.ndarray | None = None


def read(value: object, asked: int) -> dict[str, Metric]:
    """What evaluate returned after asking for `asked` samples, checked.

    DataError where it is anything but finite numbers, (value, samples) or scores of every sample, by name.
    """
    if not isinstance(value, Mapping) or not value:
        raise DataError(
            f"evaluate gave {value!r} instead of a dict of numbers", where="key 'evaluate'",
            todo="return a dict such as {'accuracy': 0.93}",
        )  # fmt: skip
    return {str(name): _metric(str(name), item, asked) for name, item in value.items()}


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The metrics as plain numbers."""
    return {name: metric.value for name, metric in metrics.items()}


def intervals(
    metrics: Mapping[str, Metric], asked: int, others: Mapping[str, float] | None = None
) -> dict[str, Interval]:
    """The 95 % interval of every metric of which one can be told; the others are left out.

    `asked`: samples that evaluate asked for. `others`: the metrics of the unoptimised model, which tell the scale (a
    value above 1 is a percentage) and whether a plain number is a proportion.
    """
    found = {name: _interval(metric, asked, (others or {}).get(name)) for name, metric in metrics.items()}
    return {name: interval for name, interval in found.items() if interval is not None}


def wilson(share: float, samples: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion 0..1 (Wilson, J. Am. Stat. Assoc. 22, 1927, p. 209)."""
    squared = _Z * _Z / samples
    centre = (share + squared / 2) / (1 + squared)
    half = _Z * math.sqrt(share * (1 - share) / samples + squared / (4 * samples)) / (1 + squared)
    return max(0.0, centre - half), min(1.0, centre + half)


def _interval(metric: Metric, asked: int, other: float | None) -> Interval | None:
    if metric.scores is not None:
        return _of_scores(metric.scores)
    scale = 100.0 if max(metric.value, other or 0.0) > 1 else 1.0
    if not 0 <= metric.value <= scale:
        return None
    if metric.samples is not None:
        return _proportion(metric.value / scale, metric.samples, scale)
    counts = [asked * value / scale for value in (metric.value, other) if value is not None]
    whole = all(abs(count - round(count)) <= _WHOLE for count in counts)
    if whole and any(0 < round(count) < asked for count in counts):  # none and all are whole counts of anything
        return _proportion(metric.value / scale, asked, scale)
    return None


def _proportion(share: float, samples: int, scale: float) -> Interval:
    low, high = wilson(share, samples)
    return Interval(low=low * scale, high=high * scale, samples=samples, method="wilson")


def _of_scores(scores: np.ndarray) -> Interval | None:
    """Of scores that are 0 or one other value a proportion's; else by resampling, with the same draws each time."""
    count, largest = len(scores), float(scores.max())
    if count < 2:
        return None
    if largest > 0 and np.isin(scores, (0.0, largest)).all():
        return _proportion(float((scores == largest).mean()), count, largest)
    if count > _MOST_RESAMPLED:
        half = _Z * float(scores.std(ddof=1)) / math.sqrt(count)
        return Interval(low=scores.mean() - half, high=scores.mean() + half, samples=count, method="normal")
    rng = np.random.default_rng(0)
    means = [float(scores[rng.integers(0, count, count)].mean()) for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(low=float(low), high=float(high), samples=count, method="bootstrap")


def _metric(name: str, value: Any, asked: int) -> Metric:
    if isinstance(value, tuple) and len(value) == 2 and _is_number(value[1]):
        samples = value[1]
        if int(samples) != samples or samples < 1:
            raise _wrong(name, value, "return (value, samples) with a whole number of samples")
        return Metric(_number(name, value[0]), samples=int(samples))
    array = _as_scores(value)
    if array is None:
        return Metric(_number(name, value))
    if array.shape != (asked,) or not array.size or not np.isfinite(array).all():
        what = f"an array of shape {array.shape}"
        raise _wrong(name, what, f"return a number, or one finite score for each of the {asked} samples")
    return Metric(float(array.mean()), scores=array)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _as_scores(value: Any) -> np.ndarray | None:
    """A list or an array with a dimension, as float64; None for a single number, also of numpy and torch."""
    try:
        array = np.asarray(value)
        return array.astype(np.float64) if array.ndim else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # takes numpy and torch scalars too
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(name, value, "return finite numbers")
    return number


def _wrong(name: str, value: object, todo: str) -> DataError:
    given = value if isinstance(value, str) else repr(value)
    return DataError(f"evaluate gave {given} for the metric '{name}'", where="key 'evaluate'", todo=todo)
