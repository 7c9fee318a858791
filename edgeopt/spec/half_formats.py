"""The two 16-bit float formats: range, precision, and how close a program in one of them must stay to fp32."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

HalfPrecision = Literal["fp16", "bf16"]

# So many roundings may lie one behind the other between input and output: a transformer of 12 blocks has about 200, a
# ResNet-152 about 450. Rounding errors are as good as independent, so that n of them add up like the steps of a random
# walk, to sqrt(n) times one (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
# Comput. 41(5), 2019).
ROUNDINGS = 600


class HalfFormat(NamedTuple):
    """A 16-bit float. `significand_bits` counts the hidden one; `smallest` is the smallest number above 0.

    fp16 is binary16 of IEEE 754; bf16 is the upper half of its binary32, with the same exponents.
    """

    name: HalfPrecision
    significand_bits: int
    largest: float
    smallest_normal: float
    smallest: float

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of one rounding to nearest, in the range of normal numbers."""
        return 2.0**-self.significand_bits

    @property
    def least_sqnr_db(self) -> float:
        """What a program in this format must keep against fp32: 38 dB for fp16, 20 dB for bf16.

        20 log10(1 / unit_roundoff) - 10 log10(ROUNDINGS), rounded down.
        """
        return float(math.floor(-20 * math.log10(self.unit_roundoff) - 10 * math.log10(ROUNDINGS)))


FORMATS: dict[str, HalfFormat] = {
    "fp16": HalfFormat("fp16", 11, 65504.0, 2.0**-14, 2.0**-24),
    "bf16": HalfFormat("bf16", 8, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133),
}
HALF_PRECISIONS: tuple[HalfPrecision, ...] = get_args(HalfPrecision)
