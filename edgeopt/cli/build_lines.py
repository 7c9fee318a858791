"""The lines that a build prints: one a stage, one a candidate at a gate, one a refusal, and the result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from edgeopt.flows.build import Built, Listener
from edgeopt.pipeline.stages import StageRecord
from edgeopt.spec.half_formats import HALF_PRECISIONS
from edgeopt.spec.manifest import Refusal
from edgeopt.spec.profile import Profile


class Lines:
    """Prints to stdout as things happen; nothing when `quiet`."""

    def __init__(self, *, quiet: bool):
        self._quiet = quiet
        self._gate = None
        self.listener = Listener(stage=self._stage, gate=self._row, refused=self._refused)

    def start(self, name: str, profile: Profile) -> None:
        self._say(f"{name} for {profile.name}: {profile.title}")
        for note in profile.notes:
            self._say(f"  note: {note}")

    def end(self, built: Built, place: Path) -> None:
        if built.artifact is None:
            return
        if built.record.get("cached"):
            self._say("nothing has changed since it was built")
        manifest, selection = built.artifact.manifest, built.selection
        size = sum(file.size for file in manifest.files.values())
        self._say(f"artifact {place}  {_size(size)}  sha256 {built.artifact.digest[:12]}")
        self._say(f"  runs first: {selection.candidate}  ({selection.reason})")
        for recipe in manifest.engine_recipes:
            self._say(f"  left for the device: the TensorRT engine of {recipe.candidate} is built there")

    def _stage(self, record: StageRecord) -> None:
        if record.skipped:
            self._say(f"{record.name:<11} left out: {record.skipped}")
            return
        columns = [f"{record.name:<11}", f"{record.seconds:6.1f} s", "(cached)" if record.cached else "        "]
        columns.append(f"{_size(record.size_bytes):>10}  {record.nodes:>4} nodes")
        columns.append(f"error {_error(record)}")
        self._say("  ".join(columns))
        for note in _notes(record):
            self._say(f"{'':<13}{note}")

    def _row(self, gate: str, row: Any) -> None:
        if gate != self._gate:
            self._gate = gate
            self._say(f"gate {gate}")
        self._say("  " + gate_line(row))

    def _refused(self, refusal: Refusal) -> None:
        self._say(f"  not in the artifact: {refusal.candidate}: {refusal.reason}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            click.echo(line)


def gate_line(row: Any) -> str:
    """One candidate at a gate: metrics, latency, kept or dropped and why."""
    result = row.result
    figures = [f"{name} {value:.4g}" for name, value in sorted(result.metrics.items())]
    if not figures and result.sqnr_db is not None:
        figures = [f"SQNR {result.sqnr_db:.1f} dB (proxy)" if math.isfinite(result.sqnr_db) else "equal (proxy)"]
    if result.p50_ms is not None and row.stand_in is None:
        figures.append(f"p50 {result.p50_ms:.3f} ms")
    by_flag = row.candidate.precision in HALF_PRECISIONS and row.candidate.file == "float.onnx"
    in_fp32 = " in fp32" if by_flag else ""
    where = f", judged by {row.stand_in} here{in_fp32}" if row.stand_in else ""
    word = "kept" if row.kept else f"dropped: {row.reason}"
    return f"{row.candidate.name:<18} {'  '.join(figures)}{where}  {word}"


def _notes(record: StageRecord) -> list[str]:
    details = record.details
    lines = [f"note: {note}" for note in details.get("notes", [])]
    done = [p for p in details.get("passes", []) if p.get("changed")]
    if done:
        lines.append("passes: " + ", ".join(f"{p['name']} {p['changed']}" for p in done))
    lines += [
        f"pass {p['name']} dropped: {p['reason']}" for p in details.get("passes", []) if p.get("status") == "dropped"
    ]
    lines += [
        f"{p['name']} matched nothing: {'; '.join(p['declined'])}" for p in details.get("passes", [])
        if p["name"].startswith("rule:") and p.get("status") == "nothing"
    ]  # fmt: skip
    if "half" in details:
        lines.append(_half_line(details["half"]))
    return [*lines, *(f"warning: {warning}" for warning in details.get("warnings", []))]


def _half_line(half: dict[str, Any]) -> str:
    """What became of a program in a 16-bit precision."""
    if half["refused"]:
        return f"refused: {half['refused']}"
    return (
        f"{half['in_half']} of {half['operators']} operators in {half['precision']}, {len(half['islands'])} islands in "
        f"fp32, {half['casts']} casts, weights {_size(half['bytes_before'])} -> {_size(half['bytes_after'])}"
    )


def _error(record: StageRecord) -> str:
    if record.max_abs_error is None:
        return "not measured"
    if record.max_abs_error == 0:
        return "0"
    return f"{record.max_abs_error:.1e} ({record.sqnr_db:.1f} dB)"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
