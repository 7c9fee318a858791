"""Two reports compared, as text for a terminal: the verdict first, then each candidate, then the circumstances."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgeopt.spec.comparison import CandidateChange, Change, Comparison

_STYLES = {"better": "bold green", "worse": "bold red", "same": "bold", "not comparable": "bold yellow"}


def render(found: Comparison) -> Group:
    """The comparison as something that rich prints."""
    return Group(*_parts(found))


def _parts(found: Comparison) -> Iterator[RenderableType]:
    yield Text.assemble((found.verdict.upper(), _STYLES[found.verdict]), "  " + "; ".join(found.reasons))
    yield Text(f"A  {found.a}", style="dim")
    yield Text(f"B  {found.b}", style="dim")
    for note in found.notes:
        yield Text(f"note: {note}", style="yellow")
    if found.runs is not None and found.runs.a != found.runs.b:
        yield from _candidate(found.runs, f"what runs: {found.runs.a} in A, {found.runs.b} in B")
    for candidate in found.candidates:
        yield from _candidate(candidate, candidate.b or candidate.a or "")
    if found.circumstances:
        yield Text()
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("not the same", "A", "B"):
            table.add_column(title, overflow="fold")
        for difference in found.circumstances:
            table.add_row(difference.name, difference.a, difference.b)
        yield table


def _candidate(change: CandidateChange, title: str) -> Iterator[RenderableType]:
    yield Text()
    if not change.figures:
        which = f"only in {change.only}: " if change.only else ""
        yield Text.assemble((title, "bold"), f"  {which}{change.why}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in ((title, "left"), ("A", "right"), ("B", "right"), ("change", "right"), ("95 %", "right")):
        table.add_column(name, justify=justify)
    table.add_column("", overflow="fold")
    for figure in change.figures:
        table.add_row(*_row(figure), Text(figure.words, style=_STYLES[figure.verdict].replace("bold", "").strip()))
    yield table


def _row(figure: Change) -> list[str]:
    metric = figure.name.startswith("metric ")
    unit = f" {figure.unit}" if figure.unit and figure.unit != "bytes" else ""
    change = "-" if figure.ratio is None else f"{100 * (figure.ratio - 1):+.1f} %"
    interval = "-"
    if figure.interval is not None:
        low, high = figure.interval
        interval = f"{low:+.3g} to {high:+.3g}" if metric else f"{100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %"
    return [figure.name, *(_number(v) + unit if v is not None else "-" for v in (figure.a, figure.b)), change, interval]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
