"""Layers ranked by sensitivity: a table with bars for a terminal, and the same as an SVG drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table

from edgeopt.report import figures

BAR = 14  # characters of the longest bar
_ROW, _LABELS, _WIDTH, _FIGURES, _TOP = 18, 300, 420, 160, 40  # pixels
_LOUD, _QUIET = "#c0392b", "#5b7fa6"
LOUD = 0.5  # a layer with at least this share of the noise is drawn in the louder colour


@dataclass(frozen=True)
class Row:
    """A layer: SQNR in dB of the outputs when it alone is quantized (None: they do not change), `share` of the noise
    of all layers and of the multiply-accumulates, 0 to 1; `lost`: metric -> how far it falls."""

    name: str
    kind: str
    sqnr_db: float | None
    share: float
    macs_share: float
    lost: dict[str, float]


def table(rows: Sequence[Row]) -> Table:
    """The rows in their order."""
    metrics = sorted({name for row in rows for name in row.lost})
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "kind"):
        made.add_column(name)
    for name in ("SQNR dB", *(f"{metric} lost" for metric in metrics), "of the noise", "of the MACs"):
        made.add_column(name, justify="right")
    made.add_column("")
    for row in rows:
        made.add_row(
            row.name, row.kind, _db(row.sqnr_db), *(f"{row.lost.get(metric, 0):.4g}" for metric in metrics),
            figures.percent(row.share), figures.percent(row.macs_share), "#" * _length(row.share, BAR),
        )  # fmt: skip
    return made


def svg(rows: Sequence[Row], title: str) -> str:
    """The rows as horizontal bars of their share of the noise, with SQNR and metrics beside them."""
    height = _TOP + _ROW * len(rows) + 10
    width = _LABELS + _WIDTH + _FIGURES
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for at, row in enumerate(rows):
        y = _TOP + _ROW * at
        length = max(1, _length(row.share, _WIDTH))
        colour = _LOUD if row.share >= LOUD else _QUIET
        said = "; ".join([f"SQNR {_db(row.sqnr_db)} dB", *(f"{n} lost {v:.4g}" for n, v in sorted(row.lost.items()))])
        lines += [
            f"<g><title>{escape(f'{row.name} ({row.kind}): {said}')}</title>",
            f'<text x="{_LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(_short(row.name))}</text>',
            f'<rect x="{_LABELS}" y="{y + 2}" width="{length}" height="{_ROW - 5}" fill="{colour}"/>',
            f'<text x="{_LABELS + length + 6}" y="{y + 13}">{escape(figures.percent(row.share))}, '
            f"{_db(row.sqnr_db)} dB</text></g>",
        ]
    return "\n".join([*lines, "</svg>", ""])


def _length(share: float, longest: int) -> int:
    return math.ceil(longest * min(share, 1.0)) if share >= 0.0005 else 0


def _db(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f}"


def _short(name: str) -> str:
    return name if len(name) <= 44 else "..." + name[-41:]
