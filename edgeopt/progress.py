"""Progress and logging, on stderr: rich on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

log = logging.getLogger("edgeopt")

Advance = Callable[..., None]
"""Called with the amount done since the last call, in the unit of `total`, and where it changes with a new label."""


def set_up_logging(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send the `edgeopt` logger to stderr: warnings when quiet, else info, with `verbose` debug too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    log.propagate = False


class Progress:
    """Bars for long work. Quiet when stderr is not a terminal or when `quiet` is set."""

    def __init__(self, *, quiet: bool = False):
        self._shown = not quiet and sys.stderr.isatty()

    @contextlib.contextmanager
    def bar(self, label: str, total: float | None, *, unit: str = "") -> Iterator[Advance]:
        """A bar for the time of the `with` block; yields `advance(amount, label)`. `unit` 'bytes' shows rate."""
        if not self._shown:
            yield lambda amount, label=None: None
            return
        from rich import progress
        from rich.console import Console

        counts = (
            [progress.DownloadColumn(), progress.TransferSpeedColumn()]
            if unit == "bytes"
            else [progress.MofNCompleteColumn()]
        )
        columns = [progress.TextColumn("{task.description}"), progress.BarColumn(), *counts]
        console = Console(stderr=True)
        with progress.Progress(*columns, progress.TimeRemainingColumn(), console=console, transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda amount, label=None: bars.update(task, advance=amount, description=label)


SILENT = Progress(quiet=True)
