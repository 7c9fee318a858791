"""What the runner says after each round, as values for whoever watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeopt.device.readings import Readings, read


@dataclass(frozen=True)
class Round:
    """One round: how far the measurement is, each candidate's median in ms, and the device's state at its end."""

    number: int
    of: int | None  # None in a soak, which ends after `duration_s`
    at_s: float
    duration_s: float | None = None
    ms: dict[str, float] = field(default_factory=dict)
    power_w: float | None = None
    temperature_c: float | None = None
    clocks_mhz: dict[str, float] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()  # what else the machine did, and what slowed it down


class Rounds:
    """Understands one line after the other: a counter of energy takes two of them."""

    def __init__(self) -> None:
        self._before: dict[str, list] = {}

    def understand(self, said: Mapping[str, Any]) -> Round | None:
        """The round that a line of onboard/turns.py tells of; None for anything else."""
        if not isinstance(said, dict) or "round" not in said:
            return None
        last = said.get("lines", {})
        both = {name: [*([self._before[name]] if name in self._before else []), line] for name, line in last.items()}
        self._before = dict(last)
        readings = read(said.get("columns", ()), both)
        hottest = [series.values[-1] for series in readings.temperatures.values()]
        busy = ("others use the machine",) if said["busy"] else ()
        return Round(
            said["round"], said["of"], said["at_s"], said["duration_s"], said["ms"],
            power_w=_power_w(readings),
            temperature_c=max(hottest, default=None),
            clocks_mhz={name: series.values[-1] for name, series in readings.clocks.items()},
            doubts=(*busy, *(f"throttled: {name}" for name in said["throttled"])),
        )  # fmt: skip


def _power_w(readings: Readings) -> float | None:
    """The newest power: the last sample of meters, the mean between the last two of counters."""
    watts = []
    for meter in readings.power.meters:
        if hasattr(meter, "watts"):
            watts.append(float(meter.watts[-1]))
        elif len(meter.at_s) > 1:
            watts.append(float((meter.counted[-1] - meter.counted[-2]) / (meter.at_s[-1] - meter.at_s[-2])))
    return sum(watts) if watts and len(watts) == len(readings.power.meters) else None
