"""Where to clip a range: from bins of values to the range of least squared error, or of least divergence.

A wide range rounds coarsely, a narrow one clips. Both searches weigh the two on the integers that the range really
gives, zero point included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_OCTAVES = 12  # below the whole range, that are tried
_SPACINGS = (3, 24, 192)  # candidates an octave: over all octaves, then between the neighbours of the best one
_TURNS = 2  # how often both ends are moved at a spacing
_LINEAR_BINS = 1024  # from 0 to the larger end: half as many as Migacz takes, no narrower than the given ones
_SMALLEST = 128  # of these bins, the fewest that a range may hold: as many as half a range has integers
_FEW = 1e-4  # part of the values; a range may lose so many of the most extreme without a look at them
_STEP = 8  # of these bins, between two candidates
_NOTHING = 1e-12  # probability of what the integers cannot tell


@dataclass(frozen=True)
class Grid:
    """Integers from `least` to `most`; `scales(lows, highs)` gives scales and zero points, 1-D float64 tensors.

    `symmetric`: the zero point is fixed, so that only the larger end of a range counts.
    """

    least: int
    most: int
    symmetric: bool
    scales: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The integers of `values`."""
        return (values / scale).round_().add_(zero).clamp_(self.least, self.most)


def squared_errors(
    means: torch.Tensor, counts: torch.Tensor, grid: Grid, lows: torch.Tensor, highs: torch.Tensor
) -> torch.Tensor:
    """The summed squared error of quantizing `counts` values at `means` for each range (lows[i], highs[i])."""
    scale, zero = (t.unsqueeze(1) for t in grid.scales(lows, highs))
    error = grid.codes(means, scale, zero).sub_(zero).mul_(scale).sub_(means)
    return error.square_() @ counts


def least_error(means: torch.Tensor, counts: torch.Tensor, grid: Grid) -> tuple[float, float]:
    """(lowest, highest) value of the range with the least squared error.

    `means`, `counts`: float64 [bins], by rising mean. Clipping at each end and rounding are convex in the two ends, up
    to the roughness of rounding, so each end is moved in turns over its candidates: first over all octaves, then at
    finer spacings between the neighbours of the best one.
    """
    whole = min(float(means[0]), 0.0), max(float(means[-1]), 0.0)
    if grid.symmetric:
        largest = max(-whole[0], whole[1])
        found = _within(whole, _symmetric(means, counts, grid, largest))
    else:
        found = _two_sided(means, counts, grid, whole)
    return _no_worse(means, counts, grid, found, whole)


def _symmetric(means: torch.Tensor, counts: torch.Tensor, grid: Grid, largest: float) -> float:
    found = largest
    for factors in _factors():
        ends = found * factors
        found = min(float(ends[squared_errors(means, counts, grid, -ends, ends).argmin()]), largest)
    return found


def _two_sided(
    means: torch.Tensor, counts: torch.Tensor, grid: Grid, whole: tuple[float, float]
) -> tuple[float, float]:
    found, start = list(whole), whole
    for factors in _factors():
        for end in (0, 1) * _TURNS:
            ends = start[end] * factors
            ends = ends[ends.abs() <= abs(whole[end])]
            if whole[end] == 0 or not len(ends):
                continue
            fixed = torch.full_like(ends, found[1 - end])
            lows, highs = (ends, fixed) if end == 0 else (fixed, ends)
            found[end] = float(ends[squared_errors(means, counts, grid, lows, highs).argmin()])
        start = (found[0], found[1])
    return start


def _factors() -> list[torch.Tensor]:
    """What an end is multiplied by at each spacing: downwards at the first, both ways at the others."""
    first = torch.arange(-_OCTAVES * _SPACINGS[0], 1, dtype=torch.float64) / _SPACINGS[0]
    exponents = [first.flip(0)]
    for coarser, finer in zip(_SPACINGS, _SPACINGS[1:], strict=False):
        exponents.append(torch.arange(-finer // coarser, finer // coarser + 1, dtype=torch.float64) / finer)
    return [2.0**e for e in exponents]


def _no_worse(
    means: torch.Tensor, counts: torch.Tensor, grid: Grid, found: tuple[float, float], whole: tuple[float, float]
) -> tuple[float, float]:
    """The whole range where clipping gains nothing: values on the integers' own grid have no error in it."""
    lows, highs = (means.new_tensor(ends) for ends in zip(found, whole, strict=True))
    clipped, all_of_it = squared_errors(means, counts, grid, lows, highs).tolist()
    return found if clipped < all_of_it else whole


def least_divergence(means: torch.Tensor, counts: torch.Tensor, grid: Grid) -> tuple[float, float]:
    """(lowest, highest) value of the range whose integers lose the least information.

    Migacz, "8-bit Inference with TensorRT", GTC 2017: the distribution clipped to the range, against what is left of
    it when all values of one integer are spread evenly over the bins that they came from, by Kullback-Leibler
    divergence. Here the range ends with the values where they end before the threshold, the integers are those of the
    real range, and what is exactly 0 does not count, since every range holds it exactly: the zeros behind a ReLU
    would outweigh everything else. Where hardly anything lies beyond the smallest threshold, the bins are too wide for
    the bulk of the values, and the search is made inside it with finer ones.
    """
    whole = min(float(means[0]), 0.0), max(float(means[-1]), 0.0)
    largest = max(-whole[0], whole[1])
    counted = means.abs() > largest * 2.0**-23
    means, counts = means[counted], counts[counted]
    total = float(counts.sum())
    if not total:
        return 0.0, 0.0
    while float(counts[means.abs() > largest * _SMALLEST / _LINEAR_BINS].sum()) < total * _FEW:
        largest *= _SMALLEST / _LINEAR_BINS
    bins = _linear(means, counts, largest)
    thresholds = torch.arange(_SMALLEST, _LINEAR_BINS + 1, _STEP).double() * (largest / _LINEAR_BINS)
    losses = [divergence(bins, largest, grid, *_within(whole, float(t))) for t in thresholds]
    return _within(whole, float(thresholds[losses.index(min(losses))]))


def divergence(bins: torch.Tensor, largest: float, grid: Grid, low: float, high: float) -> float:
    """The Kullback-Leibler divergence, in nats, of clipping to the range.

    `bins`: counts of 2 x 1024 bins of equal width from -`largest` to `largest`, what lies beyond in the outer ones.
    """
    width = largest / _LINEAR_BINS
    first, end = _LINEAR_BINS + round(low / width), _LINEAR_BINS + round(high / width)
    held = bins[first:end]
    wanted = held.clone()
    wanted[0] += bins[:first].sum()
    wanted[-1] += bins[end:].sum()

    scale, zero = grid.scales(bins.new_tensor([low]), bins.new_tensor([high]))
    centres = (torch.arange(first, end, dtype=torch.float64) + 0.5 - _LINEAR_BINS) * width
    codes = grid.codes(centres, scale, zero).long() - grid.least
    levels = grid.most - grid.least + 1
    used = (held > 0).double()
    spread = torch.bincount(codes, held, levels) / torch.bincount(codes, used, levels).clamp_(min=1)
    told = spread[codes] * used

    wanted, told = wanted / wanted.sum(), told / told.sum().clamp_(min=_NOTHING)
    there = wanted > 0
    return float((wanted[there] * (wanted[there] / told[there].clamp(min=_NOTHING)).log()).sum())


def _linear(means: torch.Tensor, counts: torch.Tensor, largest: float) -> torch.Tensor:
    place = (means / (largest / _LINEAR_BINS)).floor().long() + _LINEAR_BINS
    return torch.bincount(place.clamp_(0, 2 * _LINEAR_BINS - 1), counts, 2 * _LINEAR_BINS)


def _within(whole: tuple[float, float], threshold: float) -> tuple[float, float]:
    return max(whole[0], -threshold), min(whole[1], threshold)
