"""A histogram of bounded size for values whose range nobody knows beforehand, one batch after another."""

from __future__ import annotations

import torch

MANTISSA_BITS = 10  # bins of an octave: 1024, each at most a quarter of a step of 8 bits wide
OCTAVES = 20  # below the largest value: what is a million times smaller counts as one bin beside zero
_PER_OCTAVE = 1 << MANTISSA_BITS
_BINS = OCTAVES * _PER_OCTAVE
_SHIFT = 23 - MANTISSA_BITS  # of a float32's 23 bits of mantissa


class Histogram:
    """Bins of equal width within an octave, as the bits of a float32 give them, so that no range has to be chosen.

    A far outlier takes one bin and leaves the others as fine as they were; a histogram of equal bins over the whole
    range would lose them. Counts are exact, and each bin has its mean, so that values on a grid keep their place.
    """

    def __init__(self) -> None:
        self._top = 0  # biased exponent of the largest value seen
        self._counts = torch.zeros(2, _BINS, dtype=torch.float64)  # positive, negative; bin 0 holds the largest
        self._sums = torch.zeros(2, _BINS, dtype=torch.float64)

    def add(self, values: torch.Tensor) -> None:
        """Count `values`, 1-D float32, none of them NaN or infinite."""
        values = values.contiguous()
        place = (values.view(torch.int32) & 0x7FFFFFFF) >> _SHIFT
        self._raise(int(place.max()) >> MANTISSA_BITS)
        bins = ((self._top + 1) * _PER_OCTAVE - 1 - place).clamp_(max=_BINS - 1)
        bins += _BINS * (values < 0)
        self._counts += torch.bincount(bins, minlength=2 * _BINS).reshape(2, _BINS)
        self._sums += torch.bincount(bins, weights=values.double(), minlength=2 * _BINS).reshape(2, _BINS)

    def bins(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(means, counts) of the bins that hold a value, float64, by rising mean."""
        counts, sums = (torch.cat([t[1], t[0].flip(0)]) for t in (self._counts, self._sums))
        held = counts > 0
        return sums[held] / counts[held], counts[held]

    def _raise(self, top: int) -> None:
        """Make room for values of the exponent `top`: bins move down, and the smallest join the last one."""
        moved = min((top - self._top) * _PER_OCTAVE, _BINS - 1)
        if top <= self._top:
            return
        self._top = top
        for table in (self._counts, self._sums):
            lost = table[:, _BINS - moved :].sum(1)
            table[:, moved:] = table[:, : _BINS - moved].clone()
            table[:, :moved] = 0
            table[:, -1] += lost
