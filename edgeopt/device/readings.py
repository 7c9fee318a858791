"""What the runner sampled, as series over time: total power, temperatures, clocks, loads, memory of the processes.

Times are the runner's, in seconds. Files (sysfs) come before tegrastats where both tell the same, since their samples
are read at a known moment; a line that cannot be understood is left out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeopt.device import nvidia_smi, tegrastats
from edgeopt.device.power import Counter, Meter, Total, counter, rapl_parts, total_mw

_OFF_MC = -100_000  # a zone that is off reads -256000


@dataclass(frozen=True)
class Series:
    """Values at moments in seconds, ascending."""

    at_s: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def within(self, since: float, until: float) -> list[float]:
        """The values of a span."""
        return list(self.values[bisect_left(self.at_s, since) : bisect_right(self.at_s, until)])


@dataclass(frozen=True)
class Readings:
    """Everything that was read. Clocks and their largest in MHz, loads in percent, temperatures in °C."""

    power: Total = Total(())
    temperatures: dict[str, Series] = field(default_factory=dict)
    clocks: dict[str, Series] = field(default_factory=dict)  # 'cpu', 'gpu', 'emc'
    clocks_max: dict[str, float] = field(default_factory=dict)
    gpu_load: Series = Series()
    reasons: tuple[tuple[float, str], ...] | None = None  # (moment, why a GPU's driver slowed it down), where it tells
    cooling: dict[str, Series] = field(default_factory=dict)  # state above 0: slowed down
    cooling_max: dict[str, float] = field(default_factory=dict)
    over_currents: dict[str, Series] = field(default_factory=dict)  # counters
    alarms: dict[str, Series] = field(default_factory=dict)
    cpu_ticks: dict[str, Series] = field(default_factory=dict)  # candidate -> 1/100 s of processor time so far
    resident_mb: dict[str, Series] = field(default_factory=dict)


def read(columns: Sequence[Mapping[str, Any]], lines: Mapping[str, Sequence[Sequence[Any]]]) -> Readings:
    """Readings of `columns` and `lines` as onboard/sample.py describes them; what is missing there is missing here."""
    files = _files(columns, lines.get("sysfs", ()))
    tegra = [(at, tegrastats.parse(text)) for at, text in lines.get("tegrastats", ())]
    smi = [(at, found) for at, text in lines.get("nvidia-smi", ()) if (found := nvidia_smi.parse(text))]
    board = _board_meter(files, tegra)
    clocks = {
        "cpu": _highest(files, "cpu_khz", 1e-3) or _of(tegra, lambda line: line.cpu_mhz),
        "gpu": _highest(files, "gpu_hz", 1e-6) or _of(tegra, lambda line: line.gpu_mhz) or _of(smi, lambda g: g.mhz),
        "emc": _of(tegra, lambda line: line.emc_mhz),
    }
    ticks, resident = _processes(lines.get("processes", ()))
    return Readings(
        power=Total([board] if board else [*_package_meters(files), *_gpu_meters(smi)]),
        temperatures=_temperatures(files, tegra, smi),
        clocks={name: series for name, series in clocks.items() if series},
        clocks_max=_clocks_max(columns, smi),
        gpu_load=_highest(files, "gpu_load", 0.1) or _of(tegra, lambda t: t.gpu_percent)
        or _of(smi, lambda g: g.load_percent) or Series(),
        reasons=_reasons(smi),
        cooling=_by_name(files, "cooling"),
        cooling_max={c["name"]: c["max"] for c in columns if c["kind"] == "cooling" and c["max"]},
        over_currents=_by_name(files, "over_current"),
        alarms=_by_name(files, "current_alarm"),
        cpu_ticks=ticks,
        resident_mb=resident,
    )  # fmt: skip


@dataclass(frozen=True)
class _Column:
    kind: str
    name: str
    most: float | None
    series: Series


def _files(columns: Sequence[Mapping[str, Any]], lines: Sequence[Sequence[Any]]) -> list[_Column]:
    """Each column with its numbers; a value that was no number is left out of its series alone."""
    rows = [(at, text.split()) for at, text in lines]
    found = []
    for index, column in enumerate(columns):
        pairs = [(at, _number(row[index])) for at, row in rows if index < len(row)]
        kept = [(at, value) for at, value in pairs if value is not None]
        found.append(_Column(column["kind"], column["name"], column["max"], _series(kept)))
    return found


def _number(text: str) -> float | None:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    return sign * float(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None


def _series(pairs: Sequence[tuple[float, float]]) -> Series:
    return Series(tuple(at for at, _ in pairs), tuple(float(value) for _, value in pairs))


def _of(lines: Sequence[tuple[float, Any]], pick) -> Series | None:
    """What `pick` gives of each line; None where it is None of all."""
    pairs = [(at, value) for at, line in lines if (value := pick(line)) is not None]
    return _series(pairs) if pairs else None


def _by_name(files: Sequence[_Column], kind: str) -> dict[str, Series]:
    """Series of a kind; of several of one name the largest value at each moment."""
    names = dict.fromkeys(column.name for column in files if column.kind == kind)
    return {name: series for name in names if (series := _highest(files, kind, 1.0, name))}


def _highest(files: Sequence[_Column], kind: str, scale: float, name: str | None = None) -> Series | None:
    """The largest of the columns of a kind at each moment, times `scale`; None where there is none."""
    found: dict[float, float] = {}
    for column in files:
        if column.kind == kind and name in (None, column.name):
            for at, value in zip(column.series.at_s, column.series.values, strict=True):
                found[at] = max(value * scale, found.get(at, value * scale))
    return _series(sorted(found.items())) if found else None


def _board_meter(files: Sequence[_Column], tegra: Sequence[tuple[float, tegrastats.Line]]) -> Meter | None:
    """The board's power, from INA3221 files where they can be read, else from tegrastats."""
    volts = {column.name: column.series for column in files if column.kind == "rail_mv"}
    amperes = {column.name: column.series for column in files if column.kind == "rail_ma"}
    rails: dict[float, dict[str, float]] = {}
    for column in files:
        if column.kind == "rail_mw":
            for at, value in zip(column.series.at_s, column.series.values, strict=True):
                rails.setdefault(at, {})[column.name] = value
    for name in [name for name in volts if name in amperes]:
        current = dict(zip(amperes[name].at_s, amperes[name].values, strict=True))
        for at, value in zip(volts[name].at_s, volts[name].values, strict=True):
            if at in current:
                rails.setdefault(at, {})[name] = value * current[at] / 1e3
    by_time = sorted(rails.items()) or [(at, dict(line.rails_mw)) for at, line in tegra if line.rails_mw]
    # a moment at which a rail could not be read is no sum of all rails
    every = {name for _, of in by_time for name in of}
    totals = [(at, total) for at, of in by_time if (total := total_mw(of)) and _whole(of, every)]
    if not totals:
        return None
    return Meter(totals[0][1][1], np.array([at for at, _ in totals]), np.array([mw / 1e3 for _, (mw, _) in totals]))


def _whole(rails: Mapping[str, float], every: set[str]) -> bool:
    total = total_mw(dict.fromkeys(every, 0.0))
    return set(rails) == every or (total is not None and total[1] in rails)


def _package_meters(files: Sequence[_Column]) -> Iterator[Counter]:
    zones = {column.name: column for column in files if column.kind == "energy_uj" and column.series.values}
    for name in rapl_parts(list(zones)):
        column = zones[name]
        yield counter(f"{name.split()[-1]} (RAPL)", column.series.at_s, column.series.values, column.most)


def _gpu_meters(smi: Sequence[tuple[float, nvidia_smi.Line]]) -> Iterator[Meter]:
    for gpu in sorted({line.gpu for _, line in smi}):
        series = _of([(at, line) for at, line in smi if line.gpu == gpu], lambda line: line.watts)
        if series:
            yield Meter(f"GPU {gpu} (driver)", np.array(series.at_s), np.array(series.values))


def _temperatures(files, tegra, smi) -> dict[str, Series]:
    found: dict[str, list[tuple[float, float]]] = {}
    for column in files:
        if column.kind == "zone_mc":
            pairs = zip(column.series.at_s, column.series.values, strict=True)
            found.setdefault(column.name, []).extend((at, value / 1e3) for at, value in pairs if value > _OFF_MC)
    if not found:
        for at, line in tegra:
            for name, value in line.temperatures_c.items():
                found.setdefault(name, []).append((at, value))
    for at, gpu in smi:
        if gpu.temperature_c is not None:
            found.setdefault(f"GPU {gpu.gpu}", []).append((at, gpu.temperature_c))
    return {name: _series(sorted(pairs)) for name, pairs in found.items() if pairs}


def _clocks_max(columns: Sequence[Mapping[str, Any]], smi: Sequence[tuple[float, nvidia_smi.Line]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for column in columns:
        for kind, name, scale in (("cpu_khz", "cpu", 1e-3), ("gpu_hz", "gpu", 1e-6)):
            if column["kind"] == kind and column["max"]:
                found[name] = max(found.get(name, 0.0), column["max"] * scale)
    if "gpu" not in found:
        clocks = [line.max_mhz for _, line in smi if line.max_mhz]
        found |= {"gpu": max(clocks)} if clocks else {}
    return found


def _reasons(smi: Sequence[tuple[float, nvidia_smi.Line]]) -> tuple[tuple[float, str], ...] | None:
    """None where no driver tells, as that of a Jetson, whose nvidia-smi knows little."""
    told = [(at, line.throttling) for at, line in smi if line.throttling is not None]
    return tuple((at, reason) for at, reasons in told for reason in reasons) if told else None


def _processes(lines: Sequence[Sequence[Any]]) -> tuple[dict[str, Series], dict[str, Series]]:
    """(processor time in ticks, resident memory in MiB) of each candidate."""
    ticks: dict[str, list[tuple[float, float]]] = {}
    resident: dict[str, list[tuple[float, float]]] = {}
    for at, text in lines:
        words = text.split()
        for name, used, held in zip(words[::3], words[1::3], words[2::3], strict=False):
            if (spent := _number(used)) is not None and (size := _number(held)) is not None:
                ticks.setdefault(name, []).append((at, spent))
                resident.setdefault(name, []).append((at, size / (1 << 20)))
    return {n: _series(p) for n, p in ticks.items()}, {n: _series(p) for n, p in resident.items()}
