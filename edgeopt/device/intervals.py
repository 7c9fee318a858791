"""Medians of rounds and ratios of paired rounds with their 95 % bootstrap intervals.

Percentile bootstrap (Efron, 1979) over the rounds, which are few and paired: what slows the machine down in one round
slows both candidates, so a ratio is taken round by round. The seed is fixed: the same rounds give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
_SEED = 0
_MOST_DRAWN = 400_000  # calls in all resamples of a percentile: a soak has many


@dataclass(frozen=True)
class Estimate:
    """A median over rounds, and the interval that it lies in with 95 % confidence."""

    value: float
    low: float
    high: float


def median(rounds: Sequence[float]) -> Estimate:
    """The median of at least one round's figures."""
    values = np.asarray(rounds, dtype=np.float64)
    picked = np.random.default_rng(_SEED).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picked], axis=1), (2.5, 97.5))
    return Estimate(float(np.median(values)), float(low), float(high))


def percentiles(rounds: Sequence[Sequence[float]], qs: Sequence[float]) -> list[Estimate]:
    """The percentiles `qs` of all calls; intervals by drawing whole rounds, whose calls resemble each other."""
    kept = [np.asarray(calls, dtype=np.float64) for calls in rounds if len(calls)]
    every = np.concatenate(kept)
    resamples = max(200, min(RESAMPLES, _MOST_DRAWN // len(every)))
    picked = np.random.default_rng(_SEED).integers(0, len(kept), (resamples, len(kept)))
    found = [np.percentile(np.concatenate([kept[i] for i in row]), qs) for row in picked]
    low, high = np.percentile(found, (2.5, 97.5), axis=0)
    values = np.percentile(every, qs)
    return [Estimate(float(v), float(a), float(b)) for v, a, b in zip(values, low, high, strict=True)]


def ratio(rounds: Sequence[float], of: Sequence[float]) -> Estimate:
    """The median of `rounds` / `of`, paired; the shorter of the two says how many pairs there are."""
    pairs = min(len(rounds), len(of))
    return median(np.asarray(rounds[:pairs], dtype=np.float64) / np.asarray(of[:pairs], dtype=np.float64))


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive values: the mean of ratios that does not depend on what they are ratios to."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=np.float64)))))


def ratio_of_medians(rounds: Sequence[float], of: Sequence[float]) -> Estimate:
    """The median of `rounds` over the median of `of`, which were not measured in turns: each is resampled by itself."""
    a, b = np.asarray(rounds, dtype=np.float64), np.asarray(of, dtype=np.float64)
    draw = np.random.default_rng(_SEED)
    upper = np.median(a[draw.integers(0, len(a), (RESAMPLES, len(a)))], axis=1)
    lower = np.median(b[draw.integers(0, len(b), (RESAMPLES, len(b)))], axis=1)
    low, high = np.percentile(upper / lower, (2.5, 97.5))
    return Estimate(float(np.median(a) / np.median(b)), float(low), float(high))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """b - a with its interval, from both intervals (MOVER: Zou and Donner, 2008; of Wilson's: Newcombe, 1998)."""
    value = b.value - a.value
    below = ((b.value - b.low) ** 2 + (a.high - a.value) ** 2) ** 0.5
    above = ((b.high - b.value) ** 2 + (a.value - a.low) ** 2) ** 0.5
    return Estimate(value, value - below, value + above)
