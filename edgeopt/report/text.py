"""A report as text for a terminal: the verdict first, then the candidates, then what did not pass."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgeopt.report import sensors
from edgeopt.spec.report import CandidateResult, Report

_STYLES = {"pass": "bold green", "fail": "bold red", "undecided": "bold yellow"}
WIDTH = 110


def render(report: Report) -> Group:
    """The report as something that rich prints."""
    return Group(*_parts(report))


def plain(report: Report, *, width: int = WIDTH) -> str:
    """The report as plain text without colours, `width` columns wide at most."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(render(report))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _parts(report: Report) -> Iterator[RenderableType]:
    if report.simulated:
        yield Text(f"SIMULATED: {report.simulated}. These are not the device's figures.", style="bold yellow")
    yield Text.assemble((report.verdict.upper(), _STYLES[report.verdict]), f"  {report.artifact} on {report.host}")
    yield Text(f"runs {report.chosen}: {report.reason}" if report.chosen else report.reason)
    yield Text()
    yield _table(report)
    if (measured := sensors.table(report)) is not None:
        yield Text()
        yield measured
    yield from sensors.lines(report)
    yield from _unmet(report)
    yield from _flags(report)
    yield Text()
    yield Text(_device(report), style="dim")
    yield Text(f"artifact {report.digest[:12]}, profile {report.profile}, {report.when_utc}", style="dim")


def _table(report: Report) -> Table:
    metrics = sorted({name for c in report.candidates for name in c.metrics})
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("candidate")
    for name in ("p50 ms", "p90 ms", "p99 ms", "load s", "peak MiB", "size MiB", *metrics, "SQNR dB", "max error"):
        table.add_column(name, justify="right")
    for candidate in report.candidates:
        style = "bold" if candidate.name == report.chosen else ""
        table.add_row(*_row(candidate, metrics), style=style)
    return table


def _row(c: CandidateResult, metrics: list[str]) -> list[str]:
    if c.failure is not None:
        return [c.name, "not run"]
    simulated = any(flag.get("flag") == "simulated" for flag in c.flags)
    return [
        f"{c.name} (simulated)" if simulated else c.name,
        *(_number(value, 3) for value in (c.p50_ms, c.p90_ms, c.p99_ms)),
        _number(c.load_s, 2),
        _number(c.peak_rss_mb, 0),
        _number(None if c.size_bytes is None else c.size_bytes / (1 << 20), 2),
        *(_metric(c, name) for name in metrics),
        "exact" if c.max_abs_error == 0 else _number(c.sqnr_db, 1),
        "-" if c.max_abs_error is None else f"{c.max_abs_error:.2g}",
    ]


def _metric(c: CandidateResult, name: str) -> str:
    """The metric, with its confidence interval where one is known."""
    if name not in c.metrics:
        return "-"
    found = c.intervals.get(name)
    return f"{c.metrics[name]:.5g}" + (f" [{found.low:.4g}, {found.high:.4g}]" if found else "")


def _number(value: float | None, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}"


def _unmet(report: Report) -> Iterator[Text]:
    """Every check that failed or is undecided; where all passed, their number."""
    unmet = [check for check in report.checks if check.verdict != "pass"]
    yield Text()
    for check in unmet:
        yield Text.assemble((f"{check.verdict:9}", _STYLES[check.verdict]), f" {check.name}: {check.evidence}")
    passed = len(report.checks) - len(unmet)
    yield Text(f"{passed} of {len(report.checks)} checks passed")


def _flags(report: Report) -> Iterator[Text]:
    for candidate in report.candidates:
        for flag in candidate.flags:
            if flag.get("status") != "applied":
                said = f": {flag['message']}" if flag.get("message") else ""
                yield Text(f"flag {flag.get('flag')} of {candidate.name} is {flag.get('status')}{said}")


def _device(report: Report) -> str:
    facts = report.environment
    runtimes = ", ".join(f"{k} {v}" for k, v in sorted(facts.get("runtimes", {}).items()) if v)
    memory = facts.get("memory_bytes")
    parts = [
        facts.get("cpu_model"),
        facts.get("machine"),
        f"{memory / (1 << 30):.1f} GiB" if memory else None,
        f"Python {facts['python']}" if facts.get("python") else None,
        runtimes,
    ]
    return ", ".join(part for part in parts if part)
