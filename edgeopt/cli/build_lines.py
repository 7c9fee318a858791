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

MOST_NAMED = 4  # layers of a try


class Lines:
    """Prints to stdout as things happen; nothing when `quiet`."""

    def __init__(self, *, quiet: bool):
        self._quiet = quiet
        self._gate = None
        self.listener = Listener(stage=self._stage, gate=self._row, refused=self._refused, tried=self._tried)

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
        if line := facts_line(row):
            self._say(f"{'':<21}{line}")

    def _tried(self, made: Any) -> None:
        if self._gate != "search":
            self._gate = "search"
            self._say("search for mixed precision")
        self._say("  " + try_line(made))

    def _refused(self, refusal: Refusal) -> None:
        self._say(f"  not in the artifact: {refusal.candidate}: {refusal.reason}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            click.echo(line)


def gate_line(row: Any) -> str:
    """One candidate at a gate: metrics with their intervals, latency, kept or dropped and why."""
    result = row.result
    figures = [f"{name} {value:.4g} {_interval(result, name)}" for name, value in sorted(result.metrics.items())]
    if not figures and result.sqnr_db is not None:
        figures = [f"SQNR {result.sqnr_db:.1f} dB (proxy)" if math.isfinite(result.sqnr_db) else "equal (proxy)"]
    if result.p50_ms is not None and row.stand_in is None:
        figures.append(f"p50 {result.p50_ms:.3f} ms")
    if result.answers_per_s is not None and row.stand_in is None:
        figures.append(f"{result.answers_per_s:.1f} answers/s")
    if row.facts is not None:
        figures.append(_size(row.facts.size_bytes))
    by_flag = row.candidate.precision in HALF_PRECISIONS and row.candidate.file == "float.onnx"
    in_fp32 = " in fp32" if by_flag else ""
    where = f", judged by {row.stand_in} here{in_fp32}" if row.stand_in else ""
    word = "kept" if row.kept else f"dropped: {row.reason}"
    return f"{row.candidate.name:<18} {'  '.join(figures)}{where}  {word}"


def try_line(made: Any) -> str:
    """One try of the search: what was done, what it came to, which layers it left float."""
    figures = [f"{name} {value:.4g}" for name, value in sorted(made.metrics.items())]
    if not figures and made.sqnr_db is not None:
        figures = [f"SQNR {made.sqnr_db:.1f} dB (proxy)"]
    if made.p50_ms is not None:
        figures.append(f"p50 {made.p50_ms:.3f} ms")
    word = "passes" if made.passed else made.reason
    named = ", ".join(made.layers_float[:MOST_NAMED])
    more = f" and {len(made.layers_float) - MOST_NAMED} more" if len(made.layers_float) > MOST_NAMED else ""
    known = " (known from the build before)" if made.resumed else ""
    return "  ".join(filter(None, [made.what + (f": {named}{more}" if named else ""), *figures, word])) + known


def facts_line(row: Any) -> str:
    """What an integer candidate really runs, and how far it is from its simulation; '' where neither is known."""
    facts, words = row.facts, []
    if facts is None or row.candidate.precision != "int8":
        return ""
    if facts.integer is not None:
        runs = f"{facts.integer_contractions} integer and {facts.float_contractions} float"
        words.append(f"runs {runs} convolutions and matrix products" + _of_meant(facts))
    if facts.simulated is not None:
        error = facts.simulated
        words.append(
            "equal to the simulated" if error.exact else f"against the simulated {error.sqnr_db:.1f} dB, "
            f"largest error {error.max_abs:.1e}"
        )  # fmt: skip
    return "; ".join(words)


def _of_meant(facts: Any) -> str:
    return f" ({facts.stayed_float} of {facts.meant} quantized ones stayed float)" if facts.stayed_float else ""


def _interval(result: Any, metric: str) -> str:
    found = result.intervals.get(metric)
    return f"[{found.low:.4g}, {found.high:.4g}]" if found else "(interval unknown)"


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
    if record.name == "qat":
        lines += _training_lines(details)
    return [*lines, *(f"warning: {warning}" for warning in details.get("warnings", []))]


def _training_lines(details: dict[str, Any]) -> list[str]:
    """What training did, and beside it what the same steps do to the float program, where that was asked for."""
    if "steps" not in details:
        return [f"trained by {details['trainer']}" if "trainer" in details else f"taken from {details['taken_from']}"]
    line = f"{details['steps']} steps, loss {details['first_loss']:.4g} -> {details['last_loss']:.4g}"
    if "best_epoch" in details:
        line += f", epoch {details['best_epoch']} of {details['epochs']} is the best"
    lines = [line]
    control = details.get("control", {})
    for name, before in (control.get("metrics_before") or {}).items():
        after, here = control["metrics_after"][name], details["metrics_after"][name]
        lines.append(f"{name}: float {before:.4g}, float after the same steps {after:.4g}, fake-quantized {here:.4g}")
    return lines


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
