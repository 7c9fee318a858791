"""Speed, power and temperatures of a report as text: a table of the candidates, and the device's state below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.table import Table
from rich.text import Text

from edgeopt.spec.report import CandidateResult, Conditions, Figure, Report

# title, value of a candidate, digits; a column that nobody has a value for is left out
_COLUMNS: tuple[tuple[str, Callable[[CandidateResult], float | Figure | None], int], ...] = (
    ("max ms", lambda c: c.max_ms, 3),
    ("fps", lambda c: c.fps, 1),
    ("cold ms", lambda c: c.cold_start_ms, 0),
    ("GPU MiB", lambda c: c.peak_gpu_mb, 0),
    ("mean W", lambda c: c.power_w, 2),
    ("peak W", lambda c: c.peak_power_w, 2),
    ("mJ/call", lambda c: c.energy_mj, 3),
    ("above idle", lambda c: c.energy_above_idle_mj, 3),
    ("°C", lambda c: c.temperature_c, 0),
    ("drift %", lambda c: c.drift_percent, 1),
)


def table(report: Report) -> Table | None:
    """The candidates that ran; None where none did."""
    ran = [c for c in report.candidates if c.failure is None]
    columns = [column for column in _COLUMNS if any(column[1](c) is not None for c in ran)]
    if not ran or not columns:
        return None
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column("candidate")
    for title, _, _ in columns:
        drawn.add_column(title, justify="right", no_wrap=True)
    for c in ran:
        drawn.add_row(
            c.name, *(_shown(value(c), digits) for _, value, digits in columns),
            style="bold" if c.name == report.chosen else "",
        )  # fmt: skip
    return drawn


def lines(report: Report) -> Iterator[Text]:
    """The device's state while it was measured; what throttled it stands out."""
    found = report.conditions
    if found is None:
        return
    if said := _state(found):
        yield Text(said)
    for one in found.throttling:
        rounds = f"in {one.rounds} rounds, {one.left_out} of them left out" if one.rounds else "in no measured round"
        yield Text.assemble(
            ("throttled", "bold yellow"), f" {one.cause}; from {one.first_s:.1f} to {one.last_s:.1f} s, {rounds}"
        )
    failed = [source for source in found.sources if source.status == "failed"]
    for source in failed:
        yield Text(f"sensors: {source.name}: {source.message}", style="yellow")
    if found.power_of is None:
        yield Text("power: no sensor of this device can be read; see docs/measuring.md", style="dim")


def _state(found: Conditions) -> str:
    parts = [f"power mode {found.power_mode}"] if found.power_mode else []
    if found.idle_power_w:
        parts.append(f"idle {found.idle_power_w.value:.2f} W")
    if found.power_of:
        parts.append(f"power is {found.power_of}")
    if found.temperatures_peak_c:
        start, peak = max(found.temperatures_start_c.values()), max(found.temperatures_peak_c.values())
        parts.append(f"{start:.0f} °C at the start, {peak:.0f} at most")
    for name, mhz in found.clocks_mhz.items():
        most = found.clocks_max_mhz.get(name)
        parts.append(f"{name} {mhz:.0f}" + (f" of {most:.0f} MHz" if most else " MHz"))
    return ", ".join(parts)


def _shown(value: float | Figure | None, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, Figure):
        half = max(value.high - value.value, value.value - value.low)
        return f"{value.value:.{digits}f} ±{half:.{digits}f}"  # the wider side of the 95 % interval
    return f"{value:.{digits}f}"
