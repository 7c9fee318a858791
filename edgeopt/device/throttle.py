"""Whether the device slowed itself down, why, and when; the strongest evidence first.

Alerts of the SoC's thermal driver (cooling devices), its counters of over-current events, alarms of the current
monitors, the reasons that a GPU's driver gives, and last, as an inference only, a clock that stays below its largest
while its processor is busy. Sources: NVIDIA's developer guides (chapters on thermal and power management: soctherm's
OC1 is under-voltage, OC2 average and OC3 instantaneous over-current), the kernel's thermal documentation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edgeopt.device.readings import Readings, Series

Span = tuple[float, float]

_OVER_CURRENTS = {
    "oc1": "under-voltage: the power supply is too weak",
    "oc2": "over-current (average): the board draws more than its supply is rated for",
    "oc3": "over-current (instantaneous): a peak that the supply is not rated for",
}
_BUSY_GPU_PERCENT, _BUSY_CORES = 80, 0.8
_BELOW = 0.9  # of the largest clock: governors leave the last step out, and clocks are read between two of them
_TICKS_A_SECOND = 100


@dataclass(frozen=True)
class Event:
    """One cause, with the moments at which it showed, ascending."""

    cause: str
    source: str
    at_s: tuple[float, ...]

    def in_any(self, spans: Sequence[Span]) -> int:
        """Into how many of `spans` it fell."""
        return sum(bisect_left(self.at_s, since) < bisect_right(self.at_s, until) for since, until in spans)


def events(readings: Readings, windows: dict[str, Sequence[Span]], *, turbo: bool = False) -> list[Event]:
    """Every cause, the strongest evidence first. `windows`: candidate -> the spans in which its calls ran.

    `turbo`: the CPU's largest clock is one that it keeps for moments or for one core, so that a lower one says nothing.
    """
    found = [*_alerts(readings), *_over_currents(readings), *_alarms(readings), *_reasons(readings)]
    spans = [span for of in windows.values() for span in of]
    found += _gpu_clock(readings, spans)
    if not turbo:
        found += _cpu_clock(readings, windows)
    return found


def _alerts(readings: Readings) -> Iterator[Event]:
    for name, series in readings.cooling.items():
        on = _moments(series, lambda state: state > 0)
        if not on:
            continue
        most = readings.cooling_max.get(name)
        state = f"{max(series.values):.0f}" + (f" of {most:.0f}" if most else "")
        if name.endswith("-throttle-alert"):
            cause = f"too hot: the {name.removesuffix('-throttle-alert').upper()} is throttled ({name})"
        elif name == "hot-surface-alert":
            cause = "too hot: the surface of the case is over its limit (hot-surface-alert)"
        else:
            cause = f"too hot: the kernel caps the clock ({name}, state {state})"
        yield Event(cause, "cooling", on)


def _over_currents(readings: Readings) -> Iterator[Event]:
    for name, series in readings.over_currents.items():
        steps = np.diff(series.values)
        if (steps > 0).any():
            count = int(steps[steps > 0].sum())
            cause = f"{_OVER_CURRENTS.get(name, f'over-current event {name}')}; {count} events"
            at_s = tuple(at for at, step in zip(series.at_s[1:], steps, strict=True) if step > 0)
            yield Event(cause, "over-current", at_s)


def _alarms(readings: Readings) -> Iterator[Event]:
    for name, series in readings.alarms.items():
        if on := _moments(series, lambda value: value > 0):
            yield Event(f"over-current: rail {name} is above its critical limit", "current alarm", on)


def _reasons(readings: Readings) -> Iterator[Event]:
    for reason in dict.fromkeys(reason for _, reason in readings.reasons or ()):
        yield Event(f"GPU: {reason}", "driver", tuple(at for at, said in readings.reasons if said == reason))


def _gpu_clock(readings: Readings, spans: Sequence[Span]) -> Iterator[Event]:
    most, clock = readings.clocks_max.get("gpu"), readings.clocks.get("gpu")
    if most is None or clock is None or readings.reasons is not None:  # its driver knows better
        return
    low = []
    for since, until in spans:
        load, clocks = readings.gpu_load.within(since, until), clock.within(since, until)
        if load and clocks and np.median(load) >= _BUSY_GPU_PERCENT and np.median(clocks) < _BELOW * most:
            low.append((since + until) / 2)
    if low:
        slowest = min(float(np.median(clock.within(*span))) for span in spans if clock.within(*span))
        yield Event(f"GPU clock {slowest:.0f} of {most:.0f} MHz while it was busy", "gpu clock", tuple(sorted(low)))


def _cpu_clock(readings: Readings, windows: dict[str, Sequence[Span]]) -> Iterator[Event]:
    most, clock = readings.clocks_max.get("cpu"), readings.clocks.get("cpu")
    if most is None or clock is None:
        return
    low, slowest = [], most
    for name, spans in windows.items():
        for since, until in spans:
            clocks = clock.within(since, until)
            middle = float(np.median(clocks)) if clocks else most
            if middle < _BELOW * most and _cores(readings.cpu_ticks.get(name, Series()), since, until) >= _BUSY_CORES:
                low.append((since + until) / 2)
                slowest = min(slowest, middle)
    if low:
        yield Event(f"CPU clock {slowest:.0f} of {most:.0f} MHz while it was busy", "cpu clock", tuple(sorted(low)))


def _cores(ticks: Series, since: float, until: float) -> float:
    """How many cores a process kept busy from its first to its last sample of the span; 0 where that is not known."""
    first, last = bisect_left(ticks.at_s, since), bisect_right(ticks.at_s, until) - 1
    if last <= first or ticks.at_s[last] <= ticks.at_s[first]:
        return 0.0
    return (ticks.values[last] - ticks.values[first]) / _TICKS_A_SECOND / (ticks.at_s[last] - ticks.at_s[first])


def _moments(series: Series, holds) -> tuple[float, ...]:
    return tuple(at for at, value in zip(series.at_s, series.values, strict=True) if holds(value))
