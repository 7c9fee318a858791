"""From what the runner sampled to figures: power and energy of each candidate, and what state the device was in.

Energy is the power integrated over the calls of a round, divided by them; a figure is the median over the rounds that
count, with its interval. The times of samples and of calls are of one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeopt.device import intervals, nvpmodel, throttle
from edgeopt.device.readings import Readings, Series, read
from edgeopt.device.runner import Response, Run
from edgeopt.spec.report import Conditions, Figure, Moment, Source, Throttling

Span = tuple[float, float]
_QUARTER = 4  # a soak's drift: its last quarter against its first
_LEAST_ROUNDS_OF_DRIFT = 8


@dataclass(frozen=True)
class Observed:
    """What was sampled during one measurement, understood. `rounds`: (span, whether it counts) of all rounds."""

    sensors: dict[str, Any]
    readings: Readings
    events: Sequence[throttle.Event]
    rounds: Sequence[tuple[Span, bool]]
    idle_w: Figure | None

    @property
    def started_s(self) -> float:
        return self.sensors["started_s"]

    @property
    def counted(self) -> list[Span]:
        """The spans of the rounds that count."""
        return [span for span, counts in self.rounds if counts]

    def slowed(self, span: Span) -> bool:
        """Whether anything showed in `span` that the device was slowing itself down."""
        return any(event.in_any([span]) for event in self.events)


def observe(response: Response) -> Observed | None:
    """What the sensors said; None where the runner sampled none."""
    sensors = response.sensors
    if sensors is None:
        return None
    readings = read(sensors["columns"], sensors["lines"])
    windows = {name: [(w[0], w[1]) for w in run.windows if w] for name, run in response.runs.items()}
    # the largest clock of a PC's CPU is that of one core for a moment
    events = throttle.events(readings, windows, turbo=response.environment.get("machine") != "aarch64")
    rounds = [((r["started_s"], r["ended_s"]), r["counts"]) for r in sensors["rounds"]]
    return Observed(sensors, readings, events, rounds, _idle(readings, sensors.get("idle_s")))


def figures(name: str, run: Run, seen: Observed | None) -> dict[str, Any]:
    """The fields of a CandidateResult that sensors give; {} where there were none."""
    if seen is None:
        return {}
    windows = [w for w in run.windows if w]
    spans = [(since, until) for since, until, _ in windows]
    power, joules = seen.readings.power, [seen.readings.power.joules(*span) for span in spans]
    per_call = [1e3 * j / calls for j, (_, _, calls) in zip(joules, windows, strict=True) if j is not None and calls]
    watts = [power.watts(*span) for span in spans]
    peaks = [peak for span in spans if (peak := power.peak(*span)) is not None]
    energy = _figure(per_call)
    held = run.gpu_bytes / (1 << 20) if run.gpu_bytes is not None else seen.sensors["gpu_memory"].get(name)
    return {
        "power_w": _figure([w for w in watts if w is not None]),
        "peak_power_w": max(peaks) if peaks else None,
        "energy_mj": energy,
        "energy_above_idle_mj": _above_idle(joules, windows, seen.idle_w) if energy else None,
        "temperature_c": _hottest(seen.readings.temperatures, spans or seen.counted),
        "clocks_mhz": _clocks(seen.readings, spans or seen.counted),
        "peak_gpu_mb": held,
        "throttled_rounds": sum(seen.slowed(span) for span in spans or seen.counted),
    }


def conditions(seen: Observed | None) -> Conditions | None:
    """The state of the device during a measurement."""
    if seen is None:
        return None
    mode = nvpmodel.parse_query(seen.sensors.get("power_mode") or "")
    found = seen.readings
    return Conditions(
        power_mode=mode.name if mode else None,
        interval_s=seen.sensors["interval_s"],
        samples=max((len(lines) for lines in seen.sensors["lines"].values()), default=0),
        sources=tuple(Source(**source) for source in seen.sensors["sources"]),
        idle_power_w=seen.idle_w,
        power_of=found.power.of or None,
        temperatures_start_c={name: series.values[0] for name, series in found.temperatures.items()},
        temperatures_peak_c={name: max(series.values) for name, series in found.temperatures.items()},
        clocks_mhz=_clocks(found, seen.counted),
        clocks_max_mhz=found.clocks_max,
        throttling=tuple(_throttling(event, seen) for event in seen.events),
    )


def slowed_down(seen: Observed | None, rounds: int) -> str | None:
    """Why the times of rounds that count are doubtful; None where the device did not slow itself down in them."""
    causes = [event.cause for event in seen.events if event.in_any(seen.counted)] if seen and rounds else []
    return f"the device throttled in {rounds} of {len(seen.counted)} rounds: {causes[0]}" if causes else None


def series(response: Response, seen: Observed | None) -> tuple[Moment, ...]:
    """A row a round that counts: what each candidate took, and the device's state meanwhile."""
    if seen is None:
        return ()
    rows = []
    for number, span in enumerate(seen.counted):
        of = {name: run.rounds_s[number] for name, run in response.runs.items() if number < len(run.rounds_s)}
        held = {name: s.within(*span) for name, s in seen.readings.resident_mb.items()}
        watts = seen.readings.power.watts(*span)
        rows.append(
            Moment(
                at_s=round(span[0] - seen.started_s, 3),
                ms={name: 1e3 * float(np.median(calls)) for name, calls in of.items() if calls},
                power_w=watts,
                temperature_c=_hottest(seen.readings.temperatures, [span]),
                clocks_mhz=_clocks(seen.readings, [span]),
                rss_mb={name: max(values) for name, values in held.items() if values},
                throttled=seen.slowed(span),
            )
        )
    return tuple(rows)


def drift_percent(run: Run) -> Figure | None:
    """How much slower the last quarter of the rounds was than the first, in percent; None for too few of them."""
    medians = [float(np.median(calls)) for calls in run.rounds_s if calls]
    if len(medians) < _LEAST_ROUNDS_OF_DRIFT:
        return None
    quarter = len(medians) // _QUARTER
    found = intervals.ratio(medians[-quarter:], medians[:quarter])
    return Figure(
        value=100 * (found.value - 1), low=100 * (found.low - 1), high=100 * (found.high - 1), rounds=len(medians)
    )


def _idle(readings: Readings, span: Sequence[float] | None) -> Figure | None:
    """Mean power before the first call, its interval over tenths of that time."""
    if not span:
        return None
    edges = np.linspace(span[0], span[1], 11)
    parts = [readings.power.watts(since, until) for since, until in zip(edges[:-1], edges[1:], strict=True)]
    return _figure([watts for watts in parts if watts is not None])


def _above_idle(joules: Sequence[float | None], windows, idle: Figure | None) -> Figure | None:
    if idle is None:
        return None
    pairs = [(j, *window) for j, window in zip(joules, windows, strict=True) if j is not None and window[2]]
    return _figure([1e3 * (j - idle.value * (until - since)) / calls for j, since, until, calls in pairs])


def _figure(values: Sequence[float]) -> Figure | None:
    if not values:
        return None
    found = intervals.median(values)
    return Figure(value=found.value, low=found.low, high=found.high, rounds=len(values))


def _hottest(temperatures: dict[str, Series], spans: Sequence[Span]) -> float | None:
    found = [value for s in temperatures.values() for span in spans for value in s.within(*span)]
    return max(found, default=None)


def _clocks(readings: Readings, spans: Sequence[Span]) -> dict[str, float]:
    found = {name: [v for span in spans for v in s.within(*span)] for name, s in readings.clocks.items()}
    return {name: float(np.median(values)) for name, values in found.items() if values}


def _throttling(event: throttle.Event, seen: Observed) -> Throttling:
    every = [span for span, _ in seen.rounds]
    return Throttling(
        cause=event.cause,
        source=event.source,
        first_s=round(min(event.at_s) - seen.started_s, 3),
        last_s=round(max(event.at_s) - seen.started_s, 3),
        rounds=event.in_any(every),
        left_out=event.in_any([span for span, counts in seen.rounds if not counts]),
    )
