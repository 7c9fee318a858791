"""The gates: lowered candidates are run by the device's own runner, judged, and dropped with their reason.

Accuracy decides what the artifact holds. Speed decides what it runs first, where this machine is one that the profile
describes, or a device is at hand (`build --on`); else the speed is undecided until the device itself has measured.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeopt.device import choice, emulated, judge, session
from edgeopt.device.measured import Questions, busy, candidate_result, timing_feed
from edgeopt.device.runner import Request, Response, Timing, measure
from edgeopt.onboard import environment
from edgeopt.pipeline import lowered_facts, op_files
from edgeopt.pipeline.baseline import Baseline, user_evaluate
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.lowered_facts import Facts
from edgeopt.ports.local import LABEL, LocalConnection
from edgeopt.program import Program, Signature, custom_ops
from edgeopt.progress import log
from edgeopt.spec.manifest import Candidate, Feed, Selection
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_values import VNNI_FLAGS
from edgeopt.spec.report import CandidateResult, Check

# How another machine's integer candidate is judged here: the Q/DQ operators one by one, in float. Fused int8 kernels
# sum in int16 on an x86 CPU without VNNI and saturate (docs/numbers.md), which a GPU, an ARM or a VNNI CPU does not.
_OPERATOR_BY_OPERATOR = {"graph_optimization": "off"}
JUDGED = ("metric ", "proxy ", "reference ")  # the checks that a search for mixed precision can mend


@dataclass(frozen=True)
class GateRow:
    """One candidate at a gate: what was measured, the checks, and whether it is kept."""

    candidate: Candidate
    result: CandidateResult
    checks: tuple[Check, ...]
    stand_in: str | None = None  # the runtime that judged it here, where this machine is not the target
    facts: Facts | None = None
    noise: dict[str, Any] | None = None  # what else the machine did, see device.runner.Response

    @property
    def kept(self) -> bool:
        return self.result.failure is None and judge.verdict(self.checks) != "fail"

    @property
    def reason(self) -> str:
        return self.result.failure or judge.failures(self.checks)


def target_is_here(profile: Profile) -> bool:
    """Whether this machine is one that the profile describes, so that times count and kernels round as there."""
    target = profile.target
    if target.kind != "cpu" or target.arch != platform.machine():
        return False
    flags = set(environment.describe()["cpu_flags"])
    return set(target.cpu_features) <= flags and (not target.vnni or bool(flags & VNNI_FLAGS))


def run_gate(
    folder: Path, candidates: tuple[Candidate, ...], signature: Signature, feeds: tuple[Feed, ...],
    baseline: Baseline, job: Job, *, rounds: int, calls: int, programs: Mapping[str, Program] | None = None,
    warn: bool = True,
) -> tuple[GateRow, ...]:  # fmt: skip
    """Run the candidates whose files lie in `folder`, interleaved, each in a process of its own, and judge them.

    `feeds` are the reference calls; the tensors of reference and cases lie below `folder` too. They run on the job's
    device, else here. Where that is the target, `rounds` times `calls` of each candidate are timed, and none where
    `rounds` is 0. `programs`: candidate -> the program that it was lowered from, which an integer one is compared
    with. `warn`: of other work on the machine, which makes times uncertain.
    """
    evaluate = user_evaluate(job, signature) if job.project.evaluate else None
    asked = Questions(
        folder, feeds, baseline.cases, evaluate, base=job.project.folder, classifier=job.project.classifier,
        baseline=baseline.metrics, mode=job.profile.measure.mode,
    )  # fmt: skip
    ran = [c if _runs_as_it_is(c, job) else _stand_in(c) for c in candidates]
    there = [c for c in ran if _runs_as_it_is(c, job)] if job.device else []
    request = Request(
        folder=str(folder.resolve()), candidates=[c for c in ran if c not in there], inputs=signature.inputs,
        outputs=signature.outputs, feeds=asked.feeds,
        timing=_timing(ran, signature, feeds, job, rounds, calls) if rounds and target_is_here(job.profile) else None,
        op_libraries=op_files.put_for_here(custom_ops.of(job.project), folder),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        responses: dict[str, Response] = {}
        if there:
            timing = _timing(there, signature, feeds, job, rounds, calls) if rounds else None
            held = dataclasses.replace(request, candidates=there, timing=timing)
            responses |= dict.fromkeys((c.name for c in there), _on_device(held, folder, job, Path(scratch, "there")))
        if request.candidates:
            alone = dataclasses.replace(request, timing=None) if job.device else request
            with LocalConnection() as connection:
                found = measure(connection, alone, Path(scratch), python=sys.executable, progress=job.progress)
            responses |= dict.fromkeys((c.name for c in request.candidates), found)
        results = [_result(c, responses[c.name], asked) for c in ran]
        facts = []
        for c in candidates:
            program = (programs or {}).get(c.name)
            simulated = lowered_facts.against_simulation(c, folder, program, asked.calls, responses[c.name])
            facts.append(lowered_facts.facts_of(c, folder, job.profile, program, simulated))
    if warn:
        _warn_when_busy(responses)
    return tuple(
        GateRow(
            candidate, result, _checks(candidate, result, known, baseline, job), _stood_in(candidate, one), known,
            responses[candidate.name].noise,
        )
        for candidate, one, result, known in zip(candidates, ran, results, facts, strict=True)
    )  # fmt: skip


def _result(candidate: Candidate, response: Response, asked: Questions) -> CandidateResult:
    return emulated.bare(candidate_result(candidate, response, asked), emulated.said(response.environment))


def _runs_as_it_is(candidate: Candidate, job: Job) -> bool:
    """Whether the candidate runs as on its target; an engine is built by `prepare`, which comes after the build."""
    if job.device is not None:
        return candidate.runtime != "tensorrt"
    return target_is_here(job.profile)


def _timing(candidates: list[Candidate], signature: Signature, feeds: tuple[Feed, ...], job: Job, rounds, calls):
    wanted = job.profile.measure
    return Timing(
        timing_feed(signature.inputs, signature.axes, feeds), rounds=rounds, calls=calls, max_s=10, mode=wanted.mode,
        repeats=rounds // 2,
        streams=wanted.streams, tune=tuple(c.name for c in candidates) if wanted.tune else (),
    )  # fmt: skip


def _on_device(request: Request, folder: Path, job: Job, into: Path) -> Response:
    """The device's answer to the request; what its files lack there travels first."""
    device = job.device
    custom = custom_ops.of(job.project)
    libraries, held = op_files.put_for_target(custom, job.profile.target.arch, folder, request.candidates, ())
    tensors = {ref.file for refs in request.feeds.values() for ref in refs.values()}
    wanted = {*(c.file for c in request.candidates), *held, *tensors}
    place = device.holding(folder, session.files_of(folder, wanted))
    asked = dataclasses.replace(request, folder=place, op_libraries=libraries)
    return measure(device.connection, asked, into, python=device.python, progress=job.progress)


def _checks(
    candidate: Candidate, result: CandidateResult, facts: Facts, baseline: Baseline, job: Job
) -> tuple[Check, ...]:
    tolerance, classifier = candidate.tolerance, job.project.classifier
    accuracy = judge.accuracy(result, tolerance, baseline.metrics, job.limits, classifier=classifier)
    return accuracy + lowered_facts.integer_check(facts)


def _stood_in(candidate: Candidate, ran: Candidate) -> str | None:
    return ran.runtime if ran is not candidate else None


def _warn_when_busy(responses: Mapping[str, Response]) -> None:
    """Say that times are uncertain where others used the cores while they were taken."""
    for why in {busy(response.noise) for response in responses.values()} - {None}:
        log.warning("%s while candidates were timed, also when it was repeated: the times are less certain", why)


def fastest_float(rows: tuple[GateRow, ...], sizes: dict[str, int]) -> tuple[Candidate, ...]:
    """The float candidate to time integer ones against; none where nothing was timed."""
    timed = [row.result for row in rows if row.kept and row.result.ms is not None]
    if not timed:
        return ()
    best = choice.fastest(timed, sizes)
    return tuple(row.candidate for row in rows if row.candidate.name == best.name)


def mendable(rows: tuple[GateRow, ...]) -> bool:
    """Whether the integer candidates of a gate were all dropped, and for their accuracy alone."""
    integers = [row for row in rows if row.candidate.precision == "int8"]
    failed = [check.name for row in integers for check in row.checks if check.verdict == "fail"]
    ran = all(row.result.failure is None for row in integers)
    return bool(failed) and ran and not any(r.kept for r in integers) and all(n.startswith(JUDGED) for n in failed)


def choose(
    rows: tuple[GateRow, ...], profile: Profile, sizes: dict[str, int], device: session.Device | None = None
) -> Selection:
    """The candidate that runs first: the fastest on the device or here, where that is the target, else the expected.

    `sizes` gives each candidate's file size in bytes.
    """
    results, where = [row.result for row in rows], device.label if device else LABEL
    unknown = device is not None and any(row.stand_in for row in rows)  # an engine that is not built may be the fastest
    if (device or target_is_here(profile)) and not unknown and any(r.ms is not None for r in results):
        noise = next((row.noise for row in rows if row.noise), None)
        return choice.selection(results, sizes, decided_by="build", where=where, noise=noise)
    expected = min(rows, key=lambda row: (_rank(row.candidate), sizes[row.candidate.name]))
    return Selection(
        candidate=expected.candidate.name, decided_by="build", where=where, verdict="undecided",
        reason="speed: undecided, since the target is not at hand; validate measures on the device",
    )  # fmt: skip


def _stand_in(candidate: Candidate) -> Candidate:
    """The candidate as it can be judged on a machine that is not its target."""
    if candidate.runtime == "tensorrt" or (
        candidate.runtime in ("onnxruntime", "openvino") and candidate.precision == "int8"
    ):
        return candidate.model_copy(update={"runtime": "onnxruntime", "flags": _OPERATOR_BY_OPERATOR})
    if (candidate.runtime, candidate.precision) == ("openvino", "bf16"):  # this CPU may have none
        flags = {**candidate.flags, "inference_precision": "f32"}
        return candidate.model_copy(update={"precision": "fp32", "flags": flags})
    return candidate


def _rank(candidate: Candidate) -> int:
    """int8 before the 16-bit types before fp32: the order that the device is expected to confirm."""
    return ("int8", "fp16", "bf16", "fp32").index(candidate.precision)
