"""A rollout for people: a live table on a terminal, a line a change elsewhere, and the result."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import click

from edgeopt.flows.rollout_crew import Watch
from edgeopt.progress import log

_SETTLED = ("active", "failed", "offline", "busy", "stopped", "rolled back", "not rolled back", "left")
_STYLES = {
    "active": "green", "failed": "red", "not rolled back": "red", "offline": "yellow", "busy": "yellow",
    "stopped": "yellow", "rolled back": "magenta", "left": "magenta",
}  # fmt: skip
_ROWS = 20  # of the live table: 200 devices do not fit a terminal


class Lines(Watch):
    """A line on stderr for every change of a device's state."""

    def __init__(self):
        self._states: dict[str, str] = {}
        self._lock = threading.Lock()

    def device(self, name: str, state: str, detail: str) -> None:
        with self._lock:
            # of a settled one the detail says why, of others only that bytes move
            if self._states.get(name) != state or state in _SETTLED:
                log.info("%s: %s%s", name, state, f": {detail}" if detail and state in _SETTLED else "")
            self._states[name] = state

    def say(self, text: str) -> None:
        log.info("%s", text)


class Table(Watch):
    """A table that rich draws anew as the devices go on: how many are in each state, and those that are at work."""

    def __init__(self, names: list[str], console):
        self._console = console
        self._rows = {name: ("waiting", "", 0.0) for name in names}
        self._lock = threading.Lock()

    def device(self, name: str, state: str, detail: str) -> None:
        with self._lock:
            self._rows[name] = (state, detail, time.monotonic())

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def __rich__(self):
        from rich.table import Table as RichTable
        from rich.text import Text

        with self._lock:
            rows = dict(self._rows)
        counts: dict[str, int] = {}
        for state, _, _ in rows.values():
            counts[state] = counts.get(state, 0) + 1
        title = ", ".join(f"{count} {state}" for state, count in counts.items())
        table = RichTable(title=title, title_justify="left", title_style="", box=None)
        for column in ("device", "state", ""):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        for name, (state, detail, _) in shown(rows):
            table.add_row(Text(name), Text(state, _STYLES.get(state, "")), Text(first_line(detail)))
        return table


def shown(rows: dict[str, tuple[str, str, float]]) -> list[tuple[str, tuple[str, str, float]]]:
    """The rows that a terminal has room for: those at work, then those that went wrong, then the newest others."""

    def order(row: tuple[str, tuple[str, str, float]]) -> tuple[int, float]:
        state, _, when = row[1]
        if state == "waiting":
            return 3, 0.0
        return (0 if state not in _SETTLED else 2 if state == "active" else 1), -when

    kept = {name for name, _ in sorted(rows.items(), key=order)[:_ROWS]}
    return [(name, row) for name, row in rows.items() if name in kept]


@contextlib.contextmanager
def watching(names: list[str], *, quiet: bool) -> Iterator[Watch]:
    """The Watch for this stderr, for the time of the block."""
    if quiet:
        yield Watch()
        return
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    table = Table(names, console)
    handlers, log.handlers[:] = log.handlers[:], [_Above(console)]
    try:
        with Live(table, console=console, refresh_per_second=4, vertical_overflow="ellipsis"):
            yield table
    finally:
        log.handlers[:] = handlers


class _Above(logging.Handler):
    """Log lines above the table, which they would tear apart."""

    def __init__(self, console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), markup=False, highlight=False)


def plan_lines(plan) -> list[str]:
    """A plan for people: its waves, and with several artifacts which device gets which."""
    lines = [f"rollout  {plan.name} to {len(plan.devices)} devices, up to {plan.max_failures} of a wave may fail"]
    for number, wave in enumerate(plan.waves, 1):
        lines.append(f"wave {number}   {len(wave):3}  {', '.join(wave[:6])}{' ...' if len(wave) > 6 else ''}")
    for digest, folder in plan.artifacts.items():
        count = sum(d.digest == digest for d in plan.devices)
        lines.append(f"artifact {digest[:12]} for {count}: {folder}")
    return lines


def result_lines(done) -> list[str]:
    """The result for people: a row a device, then how the rollout ended."""
    rows = [("device", "wave", "state", "candidate", "ms", "moved", "")]
    for device in done.as_dict()["devices"]:
        moved, ms = device["moved_bytes"], device["ms"]
        rows.append((
            device["name"], str(device["wave"] + 1), device["state"], device["chosen"] or "",
            "" if ms is None else f"{ms:.3f}", f"{moved / 1e6:.1f} MB" if moved else "", _remark(device),
        ))  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in range(6)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row[:6], widths, strict=True)), row[6]]).rstrip()
             for row in rows]  # fmt: skip
    return [*lines, f"rollout  {done.plan.id}: {done.result}: {done.reason}", f"reports  {done.folder}/devices/"]


def _remark(device: dict[str, Any]) -> str:
    simulated = f"SIMULATED: {device['simulated']}; " if device["simulated"] else ""
    return first_line(simulated + device["what"])


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def confirm(plan) -> None:
    """Ask on the terminal; UsageError where there is none."""
    from edgeopt.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError("this changes devices and nobody can be asked", todo="add --yes, or --dry-run to see the plan")
    click.confirm(f"Roll {plan.name} out to {len(plan.devices)} devices?", abort=True, err=True)
