"""A measurement seen live, on stderr: a table on a terminal, a line a round elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

_SHOWN = 12  # rounds in the table


@contextlib.contextmanager
def watching() -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to give a measurement as its `watch`, for the time of the block."""
    from edgeopt.device.live import Rounds

    rounds = Rounds()
    if not sys.stderr.isatty():
        yield lambda said: _say(rounds.understand(said))
        return
    from rich.console import Console
    from rich.live import Live

    seen: list = []
    with Live(console=Console(stderr=True), refresh_per_second=4) as live:

        def show(said: dict[str, Any]) -> None:
            found = rounds.understand(said)
            if found is not None:
                seen.append(found)
                live.update(table(seen))

        yield show


def table(rounds: list):
    """The last rounds as a table that rich draws."""
    from rich.table import Table

    last = rounds[-1]
    names = list(dict.fromkeys(name for found in rounds for name in found.ms))
    drawn = Table(title=f"{_progress(last)}, p50 in ms", title_justify="left", box=None, pad_edge=False)
    for name in ("round", *names, "W", "°C", "MHz", ""):
        drawn.add_column(name, justify="left" if name == "" else "right")
    for found in rounds[-_SHOWN:]:
        drawn.add_row(
            str(found.number), *(_number(found.ms.get(name), 3) for name in names), _number(found.power_w, 1),
            _number(found.temperature_c, 0), _clocks(found), "; ".join(found.doubts),
            style="yellow" if found.doubts else "",
        )  # fmt: skip
    return drawn


def line(found) -> str:
    """One round in a line."""
    parts = [f"{_progress(found)}:", ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.ms.items())]
    if found.power_w is not None:
        parts.append(f"{found.power_w:.1f} W")
    if found.temperature_c is not None:
        parts.append(f"{found.temperature_c:.0f} °C")
    if found.clocks_mhz:
        parts.append(f"{_clocks(found)} MHz")
    return "  ".join([*parts, *found.doubts])


def _say(found) -> None:
    if found is not None:
        click.echo(line(found), err=True)


def _progress(found) -> str:
    if found.duration_s:
        return f"round {found.number}, {found.at_s:.0f} of {found.duration_s:.0f} s"
    return f"round {found.number} of {found.of}" if found.number <= found.of else f"round {found.number}, a repeat"


def _clocks(found) -> str:
    return " ".join(f"{name} {mhz:.0f}" for name, mhz in found.clocks_mhz.items())


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
