"""The gates: lowered candidates are run by the device's own runner, judged, and dropped with their reason.

Accuracy decides what the artifact holds. Speed decides what it runs first, where this machine is of the target's
architecture; elsewhere the speed is undecided until the device itself has measured.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeopt.device import judge
from edgeopt.device.measured import Questions, candidate_result, timing_feed
from edgeopt.device.runner import Request, Timing, measure
from edgeopt.pipeline.baseline import Baseline, user_evaluate
from edgeopt.pipeline.job import Job
from edgeopt.ports.local import LocalConnection
from edgeopt.program import Signature
from edgeopt.spec.manifest import Candidate, Feed, Selection
from edgeopt.spec.profile import Profile
from edgeopt.spec.report import CandidateResult, Check

# TensorRT cannot run here, so its ONNX is judged by onnxruntime, operator by operator: fused int8 kernels would
# saturate on a CPU without VNNI, which the device's GPU does not (measured, see docs/numbers).
_STAND_IN = {"runtime": "onnxruntime", "flags": {"graph_optimization": "off"}}


@dataclass(frozen=True)
class GateRow:
    """One candidate at a gate: what was measured, the checks, and whether it is kept."""

    candidate: Candidate
    result: CandidateResult
    checks: tuple[Check, ...]
    stand_in: str | None = None  # the runtime that judged it where its own cannot run here

    @property
    def kept(self) -> bool:
        return self.result.failure is None and judge.verdict(self.checks) != "fail"

    @property
    def reason(self) -> str:
        return self.result.failure or judge.failures(self.checks)


def target_is_here(profile: Profile) -> bool:
    """Whether this machine is of the architecture and kind that the profile describes: then times count."""
    return profile.target.kind == "cpu" and profile.target.arch == platform.machine()


def run_gate(
    folder: Path, candidates: tuple[Candidate, ...], signature: Signature, feeds: tuple[Feed, ...],
    baseline: Baseline, job: Job,
) -> tuple[GateRow, ...]:  # fmt: skip
    """Run the candidates whose files lie in `folder`, interleaved, each in a process of its own, and judge them.

    `feeds` are the reference calls; the tensors of reference and cases lie below `folder` too.
    """
    evaluate = user_evaluate(job) if job.project.evaluate else None
    asked = Questions(
        folder, feeds, baseline.cases, evaluate, base=job.project.folder, classifier=job.project.classifier
    )
    here = [_here(c) for c in candidates]
    timing = Timing(timing_feed(signature.inputs, signature.axes, feeds), max_s=10)
    request = Request(
        folder=str(folder.resolve()), candidates=here, inputs=signature.inputs, outputs=signature.outputs,
        feeds=asked.feeds, timing=timing if target_is_here(job.profile) else None,
    )  # fmt: skip
    with LocalConnection() as connection, tempfile.TemporaryDirectory() as scratch:
        response = measure(connection, request, Path(scratch), python=sys.executable, progress=job.progress)
        results = [candidate_result(c, response, asked) for c in here]
    return tuple(
        GateRow(
            candidate,
            result,
            judge.accuracy(
                result, candidate.tolerance, baseline.metrics, job.limits, classifier=job.project.classifier
            ),
            ran.runtime if ran.runtime != candidate.runtime else None,
        )
        for candidate, ran, result in zip(candidates, here, results, strict=True)
    )


def choose(rows: tuple[GateRow, ...], profile: Profile, sizes: dict[str, int]) -> Selection:
    """The candidate that runs first: the fastest here where the target is here, else the profile's preference.

    Candidates within the noise of the fastest count as equal, and the smaller file wins. `sizes` gives each
    candidate's file size in bytes.
    """
    figures = {row.candidate.name: _figures(row) for row in rows}
    timed = [row for row in rows if row.result.p50_ms is not None]
    if not target_is_here(profile) or not timed:
        preferred = min(rows, key=lambda row: (_rank(row.candidate), sizes[row.candidate.name]))
        return Selection(
            candidate=preferred.candidate.name, decided_by="build", where="this machine", verdict="undecided",
            reason="speed: undecided, since the target is not at hand; validate measures on the device",
        )  # fmt: skip
    fastest = min(row.result.p50_ms for row in timed)
    noise = max(_spread(row.result) for row in timed)
    equal = [row for row in timed if row.result.p50_ms <= fastest * (1 + noise)]
    best = min(equal, key=lambda row: (sizes[row.candidate.name], row.result.p50_ms))
    return Selection(
        candidate=best.candidate.name, decided_by="build", where="this machine", figures=figures,
        verdict="only" if len(rows) == 1 else "faster", reason=_why(best, timed),
    )  # fmt: skip


def _here(candidate: Candidate) -> Candidate:
    return candidate.model_copy(update=_STAND_IN) if candidate.runtime == "tensorrt" else candidate


def _rank(candidate: Candidate) -> int:
    """int8 before fp16 before fp32: the order that the device is expected to confirm."""
    return ("int8", "fp16", "fp32").index(candidate.precision)


def _figures(row: GateRow) -> dict[str, Any]:
    return {"p50_ms": row.result.p50_ms, "p99_ms": row.result.p99_ms, "metrics": row.result.metrics}


def _spread(result: CandidateResult) -> float:
    """The candidate's own noise: half the relative spread of its rounds' medians."""
    return result.noise or 0.0


def _why(best: GateRow, timed: list[GateRow]) -> str:
    others = [row for row in timed if row is not best]
    if not others:
        return f"the only candidate that was measured: p50 {best.result.p50_ms:.3f} ms"
    words = ", ".join(
        f"{row.candidate.name} {row.result.p50_ms:.3f} ms ({row.result.p50_ms / best.result.p50_ms:.2f} times)"
        for row in sorted(others, key=lambda row: row.result.p50_ms)
    )
    return f"p50 {best.result.p50_ms:.3f} ms against {words}"
