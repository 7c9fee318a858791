"""What a device draws: meters over time, and energy as their integral over any span.

The whole of a board is its input rail where it has one, VDD_IN (TX2, Xavier NX, Orin NX and Nano) or POM_5V_IN (Nano);
where it has none, the sum of its rails (AGX Xavier, AGX Orin, Thor). On a PC: RAPL's `psys`, else its packages and
their memory, and GPUs by the driver; the rest of a PC is not measured. Sources: NVIDIA's developer guides ("Power
monitor"); the kernel's powercap documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

INPUT_RAILS = ("VDD_IN", "POM_5V_IN")
_SLACK = 3.0  # a span's end may lie so many sampling intervals from the nearest sample


def total_mw(rails: Mapping[str, float]) -> tuple[float, str] | None:
    """(milliwatts of the board, what they are of) from its rails; None where there are none."""
    for name in INPUT_RAILS:
        if name in rails:
            return rails[name], name
    names = [name for name in rails if name != "NC"]
    if not names:
        return None
    return sum(rails[name] for name in names), "sum of " + ", ".join(names) if len(names) > 1 else names[0]


@dataclass(frozen=True)
class Meter:
    """Power of one thing at moments in seconds, ascending: `watts` as sampled, between two samples a straight line."""

    of: str
    at_s: np.ndarray
    watts: np.ndarray

    def joules(self, since: float, until: float) -> float | None:
        """Energy from `since` to `until`; None where samples do not reach there."""
        if not _reach(self.at_s, since, until):
            return None
        inside = self.at_s[(self.at_s > since) & (self.at_s < until)]
        moments = np.concatenate(([since], inside, [until]))
        watts = np.interp(moments, self.at_s, self.watts)
        return float(np.sum((watts[1:] + watts[:-1]) / 2 * np.diff(moments)))

    def peak(self, since: float, until: float) -> float | None:
        """The largest sample of the span."""
        inside = self.watts[(self.at_s >= since) & (self.at_s <= until)]
        return float(inside.max()) if len(inside) else None


@dataclass(frozen=True)
class Counter:
    """Energy of one thing as a counter in joules that only grows, such as RAPL's once its overflows are undone."""

    of: str
    at_s: np.ndarray
    counted: np.ndarray

    def joules(self, since: float, until: float) -> float | None:
        """Energy from `since` to `until`; None where samples do not reach there."""
        if not _reach(self.at_s, since, until):
            return None
        first, last = np.interp([since, until], self.at_s, self.counted)
        return float(last - first)

    def peak(self, since: float, until: float) -> float | None:
        """The largest mean between two samples that lie in the span."""
        inside = (self.at_s >= since) & (self.at_s <= until)
        steps = np.diff(self.at_s[inside])
        rates = np.diff(self.counted[inside])[steps > 0] / steps[steps > 0]
        return float(rates.max()) if len(rates) else None


@dataclass(frozen=True)
class Total:
    """Several meters that together are the device."""

    meters: Sequence[Meter | Counter]

    @property
    def of(self) -> str:
        """What is measured, in words."""
        return " + ".join(meter.of for meter in self.meters)

    def joules(self, since: float, until: float) -> float | None:
        """Energy of all from `since` to `until`; None where one of them does not reach there, or there is none."""
        parts = [meter.joules(since, until) for meter in self.meters]
        return None if not parts or None in parts else sum(parts)

    def watts(self, since: float, until: float) -> float | None:
        """Mean power of the span."""
        joules = self.joules(since, until)
        return None if joules is None or until <= since else joules / (until - since)

    def peak(self, since: float, until: float) -> float | None:
        """The sum of the meters' peaks, which is the peak where there is one meter, and else at most too high."""
        parts = [meter.peak(since, until) for meter in self.meters]
        return None if not parts or None in parts else sum(parts)


def counter(of: str, at_s: Sequence[float], micro_joules: Sequence[int], wraps_at: int | None) -> Counter:
    """A Counter from readings in microjoules of a counter that begins anew after `wraps_at`."""
    steps = np.diff(np.asarray(micro_joules, dtype=np.float64))
    # without a known range an overflow cannot be told from a reset: nothing is counted for that step
    steps = np.where(steps < 0, steps + wraps_at + 1 if wraps_at else 0, steps)
    counted = np.concatenate(([0.0], np.cumsum(np.maximum(steps, 0)))) / 1e6
    return Counter(of, np.asarray(at_s, dtype=np.float64), counted)


def rapl_parts(names: Sequence[str]) -> list[str]:
    """Which of RAPL's zones ('intel-rapl:0 package-0', ...) make up the machine, none counted twice."""
    names = [name for name in names if "mmio" not in name]  # the same counters once more
    whole = [name for name in names if name.endswith(" psys")]
    parts = [name for name in names if re.search(r" (package-[0-9]+|dram)$", name)]
    return whole[:1] or parts


def _reach(at_s: np.ndarray, since: float, until: float) -> bool:
    """Whether there are samples on both sides of the span, or so near to it that the power can be taken for theirs."""
    if len(at_s) < 2 or until <= since:
        return False
    slack = _SLACK * float(np.median(np.diff(at_s)))
    inside = ((at_s >= since) & (at_s <= until)).any() or until - since <= slack
    return bool(inside and at_s[0] <= since + slack and at_s[-1] >= until - slack)
