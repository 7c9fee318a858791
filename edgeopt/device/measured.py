"""From what the runner returned to a candidate's figures: latencies, errors against the reference, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgeopt.device import conditions, intervals
from edgeopt.device.runner import Refs, Response, Run
from edgeopt.errors import DataError
from edgeopt.runtime import evaluation, metrics, tensors
from edgeopt.runtime.compare import agreement, output_errors, top1_agreement
from edgeopt.spec.manifest import Axis, Candidate, Feed, TensorSpec
from edgeopt.spec.report import CandidateResult


@dataclass(frozen=True)
class Questions:
    """What candidates are asked: reference calls and cases, whose tensors lie below `folder` on this machine.

    `evaluate` is the project's function where the cases are all that it asks for, else None.
    """

    folder: Path
    reference: tuple[Feed, ...]
    cases: tuple[Feed, ...]
    evaluate: evaluation.Evaluate | None
    base: Path | None = None  # the project's folder, for messages
    classifier: bool = False
    baseline: Mapping[str, float] = field(default_factory=dict)  # the unoptimised model's metrics
    mode: Literal["latency", "throughput"] = "latency"

    @property
    def feeds(self) -> dict[str, Refs]:
        """Feed id -> inputs, as the runner takes them."""
        return {name: feed.inputs for name, feed in self.calls.items()}

    @property
    def calls(self) -> dict[str, Feed]:
        """Feed id -> call, the reference calls first."""
        return dict([*_named("reference", self.reference), *_named("cases", self.cases)])


def timing_feed(inputs: Sequence[TensorSpec], axes: Mapping[str, Axis], reference: Sequence[Feed]) -> str:
    """The id of the reference call to time: the first whose axes have their `opt` sizes, else the first."""
    wanted = {spec.name: tuple(axes[size].opt if size in axes else size for size in spec.shape) for spec in inputs}
    for name, feed in _named("reference", reference):
        if all(ref.shape == wanted[key] for key, ref in feed.inputs.items()):
            return name
    return "reference/0"


def candidate_result(
    candidate: Candidate, response: Response, asked: Questions, seen: conditions.Observed | None = None
) -> CandidateResult:
    """The figures of one candidate; `failure` set where it gave none. `seen` is what sensors said meanwhile."""
    run = response.runs[candidate.name]
    fixed = {"name": candidate.name, "runtime": candidate.runtime, "precision": candidate.precision, "flags": run.flags}
    if run.failure is not None:
        return CandidateResult(**fixed, failure=f"{run.failure.kind}: {run.failure.message}")
    try:
        closeness = _closeness(candidate, response, asked)
    except DataError as why:  # an output of another size than the reference: this candidate's fault, not the build's
        return CandidateResult(**fixed, failure=f"run: {why.what}")
    sensed = conditions.figures(candidate.name, run, seen)
    times = timed(run, response.noise, asked.mode)
    doubts = [times.pop("uncertain", None), conditions.slowed_down(seen, sensed.get("throttled_rounds", 0))]
    times["uncertain"] = "; ".join(doubt for doubt in doubts if doubt) or None
    return CandidateResult(
        **fixed,
        load_s=run.load_s,
        first_call_ms=None if run.first_call_s is None else 1e3 * run.first_call_s,
        peak_rss_mb=None if run.peak_rss_bytes is None else run.peak_rss_bytes / (1 << 20),
        cold_start_ms=None if run.load_s is None or run.first_call_s is None else 1e3 * (run.load_s + run.first_call_s),
        **_metrics(candidate.name, response, asked),
        **times,
        **sensed,
        **closeness,
    )


def timed(run: Run, noise: Mapping[str, Any] | None, mode: str = "latency") -> dict[str, Any]:
    """The fields of a CandidateResult that times give: percentiles over every measured call, in ms, and the rounds.

    `noise` is half the relative spread of the rounds' medians. In throughput mode a round has one figure, and there
    are answers a second in place of percentiles.
    """
    calls = run.calls_s
    if not calls:
        return {}
    rounds = [1e3 * float(np.median(calls)) for calls in run.rounds_s if calls]
    middle = intervals.median(rounds)
    fields = {
        "noise": (max(rounds) - min(rounds)) / (2 * middle.value),
        "rounds_ms": tuple(rounds), "interval_ms": (middle.low, middle.high), "setting": run.setting,
        "tried": run.tried, "warm_up": run.warm_up, "uncertain": busy(noise),
    }  # fmt: skip
    if mode == "throughput":
        return {**fields, "answers_per_s": 1e3 / middle.value, "fps": 1e3 / middle.value}
    p50 = 1e3 * float(np.percentile(calls, 50))
    p90, p99 = intervals.percentiles(run.rounds_s, (90, 99))
    return {
        **fields, "p50_ms": p50, "p90_ms": 1e3 * p90.value, "p99_ms": 1e3 * p99.value, "max_ms": 1e3 * max(calls),
        "p90_interval_ms": (1e3 * p90.low, 1e3 * p90.high), "p99_interval_ms": (1e3 * p99.low, 1e3 * p99.high),
        "fps": 1e3 / p50, "calls": len(calls),
    }  # fmt: skip


def busy(noise: Mapping[str, Any] | None) -> str | None:
    """Why times are uncertain: what else the machine did in the rounds that count; None where it was quiet."""
    if not noise or not noise.get("busy_rounds"):
        return None
    shares = [
        f"{words} {100 * noise[key]:.0f} % of the cores" for key, words in
        (("others", "other work used"), ("steal", "the hypervisor took")) if (noise.get(key) or 0) >= 0.005
    ]  # fmt: skip
    return " and ".join(shares) or "the machine was busy"


def _closeness(candidate: Candidate, response: Response, asked: Questions) -> dict[str, float | None]:
    """Errors over every feed that has the unoptimised model's outputs, and the agreement of what chooses classes."""
    name, chosen = candidate.name, candidate.tolerance.agreement
    every = [*_named("reference", asked.reference), *_named("cases", asked.cases)]
    judged = [(feed_id, feed) for feed_id, feed in every if feed.outputs]
    given = [{key: tensors.read(asked.folder, ref) for key, ref in feed.outputs.items()} for _, feed in judged]
    found = [response.outputs(name, feed_id) for feed_id, _ in judged]
    errors = [error for output, error in output_errors(given, found).items() if output not in chosen]
    shares = [
        agreement([call[output] for call in given], [call[output] for call in found], one.axis)
        for output, one in chosen.items()
        if given
    ]
    return {
        "sqnr_db": min((e.sqnr_db for e in errors), default=None),
        "max_abs_error": max((e.max_abs for e in errors), default=None),
        "top1_agreement": min(shares) if shares else _agreement(given, found) if asked.classifier and given else None,
    }


def _metrics(name: str, response: Response, asked: Questions) -> dict[str, Any]:
    """What `evaluate` gives for the candidate's answers to the recorded cases, with intervals; {} without it."""
    if asked.evaluate is None:
        return {}
    inputs = Lazy(
        asked.cases, lambda i: {key: tensors.read(asked.folder, ref) for key, ref in asked.cases[i].inputs.items()}
    )
    outputs = Lazy(asked.cases, lambda i: response.outputs(name, f"cases/{i}"))
    given = evaluation.replayed(asked.evaluate, inputs, outputs, base=asked.base)
    return {
        "metrics": metrics.values(given.measured),
        "intervals": metrics.intervals(given.measured, given.samples, asked.baseline),
    }


def _agreement(given: Sequence[dict[str, np.ndarray]], found: Sequence[dict[str, np.ndarray]]) -> float:
    """Top-1 agreement of the first output over all samples."""
    first = next(iter(given[0]))
    samples = [len(reference[first]) for reference in given]
    shares = [top1_agreement(r[first], x[first]) for r, x in zip(given, found, strict=True)]
    return float(np.average(shares, weights=samples))


class Lazy(Sequence):
    """A sequence as long as `like` whose items are read when they are asked for, so that memory stays flat."""

    def __init__(self, like: Sequence, read):
        self._like, self._read = like, read

    def __len__(self) -> int:
        return len(self._like)

    def __getitem__(self, index):
        return self._read(index)


def _named(kind: str, feeds: Sequence[Feed]) -> list[tuple[str, Feed]]:
    return [(f"{kind}/{i}", feed) for i, feed in enumerate(feeds)]
