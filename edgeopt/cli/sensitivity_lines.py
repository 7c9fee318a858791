"""What `edgeopt inspect --sensitivity` prints and draws."""

from __future__ import annotations

from pathlib import Path

import click

from edgeopt.errors import UsageError
from edgeopt.flows.sensitivity import Sensitivity
from edgeopt.report import graph_text, layers
from edgeopt.runtime.artifact import replace_file


def check(plot: Path | None) -> None:
    """UsageError for a plot that is no .svg, before any work."""
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError("a plot is drawn as .svg", where=f"--plot {plot}", todo=f"name it {plot.with_suffix('.svg')}")


def lines(found: Sensitivity, top: int) -> None:
    """The table of the `top` layers, and how to leave one float."""
    rows = rows_of(found)
    click.echo(f"\nsensitivity of {found.name} for {found.profile}: {found.scheme}")
    click.echo("each layer alone quantized, the others float; the most sensitive first")
    for name, value in sorted(found.metrics.items()):
        click.echo(f"{name} of the unoptimised model: {value:.6g}")
    click.echo(graph_text.plain(layers.table(rows[:top])))
    if len(rows) > top:
        click.echo(f"and {len(rows) - top} more; --top {len(rows)} shows them all")
    if rows:
        worst = found.layers[0]
        pattern = worst.path if worst.path and worst.place >= 0 else worst.pattern
        click.echo(f"to leave the first one float: keep_float: ['{pattern}']")


def draw(found: Sensitivity, path: Path) -> None:
    """The ranking as an SVG file."""
    title = f"{found.name}: noise of each layer alone in int8, {found.scheme}"
    replace_file(path, layers.svg(rows_of(found), title).encode())


def rows_of(found: Sensitivity) -> list[layers.Row]:
    """The layers as rows, with their shares of the noise and of the multiply-accumulates."""
    noise = sum(layer.noise for layer in found.layers) or 1.0
    macs = sum(layer.macs for layer in found.layers) or 1
    return [
        layers.Row(layer.name, layer.rule, layer.sqnr_db, layer.noise / noise, layer.macs / macs, layer.metric_lost)
        for layer in found.layers
    ]
