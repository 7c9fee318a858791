"""The lines that `edgeopt inspect` prints: stages with their passes as they end, then the graph."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console, RenderableType

from edgeopt.flows.inspect import Inspected
from edgeopt.pipeline.stages import StageRecord
from edgeopt.report import figures, graph_text
from edgeopt.spec.profile import Profile


class Lines:
    """Prints to stdout; nothing when `quiet`. `top`: operators listed."""

    def __init__(self, *, quiet: bool, top: int):
        self._quiet, self._top = quiet, top
        self._console = Console(highlight=False, markup=False, emoji=False)

    def start(self, name: str, profile: Profile, *, chosen: bool) -> None:
        why = "" if chosen else " (this machine's; --profile names another)"
        self._say(f"{name} for {profile.name}{why}: {profile.title}")

    def stage(self, record: StageRecord) -> None:
        """One line for the stage, one for each of its passes."""
        if record.skipped:
            self._say(f"{record.name:<11} left out: {record.skipped}")
            return
        columns = [f"{record.name:<11}", f"{record.seconds:6.1f} s", "(cached)" if record.cached else "        "]
        columns += [f"{record.nodes:>4} nodes", f"{_size(record.size_bytes):>10}", f"error {_error(record)}"]
        self._say("  ".join(columns))
        for note in record.details.get("notes", []):
            self._say(f"  note: {note}")
        for warning in record.details.get("warnings", []):
            self._say(f"  warning: {warning}")
        if record.details.get("passes"):
            self._print(graph_text.passes(record.details["passes"]))

    def end(self, found: Inspected, graph: Path | None) -> None:
        """The graph, the difference, or the candidates; and where the drawing is."""
        self._say("")
        if found.before is not None:
            self._print(graph_text.difference(found.before, found.shown, found.difference))
        elif found.files:
            self._artifact(found)
        else:
            self._print(graph_text.described(found.shown, top=self._top))
        if graph is not None:
            self._say(f"\nwritten  {graph}")

    def _artifact(self, found: Inspected) -> None:
        self._say(f"{found.name} for {found.profile}")
        rows = []
        for name, row in found.files.items():
            mark = "*" if row["first"] else " "
            made = graph_text.candidate_row(f"{mark} {name}", row["description"], row["file"], row["size_bytes"])
            rows.append(made)
        self._print(graph_text.candidates(rows))
        self._say("* runs first")
        for path in found.usage:
            self._say(f"from C++: {path}")
        for description in {row["file"]: row["description"] for row in found.files.values()}.values():
            self._say("")
            self._print(graph_text.described(description, top=min(self._top, 5)))

    def _say(self, line: str) -> None:
        if not self._quiet:
            click.echo(line)

    def _print(self, renderable: RenderableType) -> None:
        if self._quiet:
            return
        if self._console.is_terminal:
            self._console.print(renderable)
        else:  # a pipe has no width of its own, and rich would fold at 80
            click.echo(graph_text.plain(renderable))


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else figures.size(size_bytes)


def _error(record: StageRecord) -> str:
    if record.max_abs_error is None:
        return "not measured"
    return "0" if record.max_abs_error == 0 else f"{record.max_abs_error:.1e} ({record.sqnr_db:.1f} dB)"
