"""Validate: an artifact's candidates run on a device, are judged against its limits, and the best is selected.

The device measures and returns raw outputs; everything is judged here. The report is written whatever the verdict.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from edgeopt.device import choice, conditions, emulated, judge
from edgeopt.device.measured import Questions, candidate_result, timing_feed
from edgeopt.device.runner import Request, Response, Sensors, Timing, Watch, measure
from edgeopt.errors import ArtifactError, DataError, DeviceError, EdgeoptError, SpaceError, ValidationError
from edgeopt.flows.place import Place
from edgeopt.flows.project import project_file_of
from edgeopt.flows.push import push_to
from edgeopt.ports.connection import Connection
from edgeopt.ports.local import LocalConnection
from edgeopt.ports.user_code import load_attribute
from edgeopt.progress import SILENT, Progress
from edgeopt.runtime.artifact import Artifact, replace_file
from edgeopt.runtime.evaluation import Evaluate, taking_nested
from edgeopt.runtime.zipapp import FILE_NAME as RUNNER
from edgeopt.spec.limits import Limits
from edgeopt.spec.manifest import REPORTS_DIR, SELECTION_NAME, Candidate, Selection
from edgeopt.spec.project import Project, load_project
from edgeopt.spec.report import CandidateResult, Check, Report, Verdict
from edgeopt.spec.values import validate as read_value

_TOTAL_S = 3600  # for everything but a soak's duration


@dataclass(frozen=True)
class How:
    """How to validate. `project` is the project file whose evaluate judges, None for the one of the build.

    `python` is the interpreter on the device; it must have the candidates' runtimes. `sensors` None samples none.
    `watch` is called after each round with what the runner says of it, see device/runner.py.
    """

    project: Path | None = None
    python: str = "python3"
    rounds: int = 5
    calls: int = 50
    threads: int | None = None
    sensors: Sensors | None = Sensors()
    duration_s: float | None = None  # a soak
    watch: Watch | None = None


@dataclass(frozen=True)
class Validated:
    """The report, where it was written, and the selection (None where no candidate passed)."""

    report: Report
    path: Path
    selection: Selection | None

    def check(self) -> None:
        """Raise where the device did not pass: SpaceError, DeviceError where no runtime is there, ValidationError."""
        if self.report.verdict == "fail":
            raise _error(self.report, self.path)


@dataclass(frozen=True)
class Judge:
    """The project's part in the verdict: its evaluate, or why there is none to replay."""

    evaluate: Evaluate | None
    missing: str
    base: Path | None = None
    classifier: bool = False


def validate_here(
    artifact: Artifact, how: How | None = None, *, progress: Progress = SILENT, select: bool = True
) -> Validated:
    """Validate on this machine, straight from the artifact's folder, by the interpreter that runs edgeopt.

    With `select` False the choice is told and not written: `selection.json` stays what it is.
    """
    how = how or How(python=sys.executable)
    with LocalConnection() as connection:
        return _validate(artifact, connection, str(artifact.folder.resolve()), how, progress, select)


def validate_at(
    place: Place, artifact: Artifact, how: How | None = None, *, progress: Progress = SILENT, select: bool = True
) -> Validated:
    """Validate the release of `artifact` at `place`, pushed first where it is not there.

    The place is locked by the caller, so that no other push or validation disturbs the figures.
    """
    if artifact.digest not in place.state().releases:
        push_to(place, artifact, progress=progress, python=(how or How()).python)
    release = place.release(artifact.digest)
    done = _validate(artifact, place.connection, release, how or How(), progress, select)
    if done.selection is not None and select:
        with tempfile.TemporaryDirectory() as scratch:  # the artifact's may be another device's by now
            own = Artifact(Path(scratch), artifact.manifest)
            own.write_selection(done.selection)
            place.connection.put(own.folder / SELECTION_NAME, f"{release}/{SELECTION_NAME}")
    return done


def by_age(folder: Path) -> list[Path]:
    """The reports beside the artifact in `folder`, oldest first: by the time in their names, then as written."""
    paths = sorted((folder / REPORTS_DIR).glob("*.json"))
    return sorted(paths, key=lambda path: (path.name.split("-")[0], path.stat().st_mtime_ns))


def latest_report(folder: Path) -> Report:
    """The newest report of the artifact in `folder`; ArtifactError where there is none."""
    paths = by_age(folder)
    if not paths:
        raise ArtifactError("no report yet", where=str(folder), todo=f"run: edgeopt validate {folder} [HOST]")
    try:
        data = json.loads(paths[-1].read_bytes())
    except ValueError as why:
        raise ArtifactError(f"not JSON: {why}", where=str(paths[-1]), todo="delete it and validate again") from None
    return read_value(Report, data, source=str(paths[-1]), error=ArtifactError)


def _validate(
    artifact: Artifact, connection: Connection, folder: str, how: How, progress: Progress, select: bool
) -> Validated:
    started = time.monotonic()
    manifest = artifact.manifest
    limits = read_value(Limits, manifest.limits, source=f"{artifact.folder}: limits", error=ArtifactError)
    judging = _judge_of(artifact, how.project)
    asked = Questions(
        artifact.folder, manifest.reference, manifest.cases, judging.evaluate, judging.base, judging.classifier,
        baseline=manifest.metrics.get("reference", {}), mode=_mode(artifact),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        response = _measure(artifact, connection, folder, how, asked, Path(scratch), progress)
        seen = conditions.observe(response)
        results = tuple(_result(artifact, candidate, response, asked, seen, how) for candidate in manifest.candidates)
    emulator, before = emulated.said(response.environment), artifact.selection()
    checks = {r.name: emulated.unjudged(_checks(artifact, r, limits, judging), emulator) for r in results}
    timed = emulated.untimed(results, emulator, first=before.candidate if before else None)
    selection = emulated.marked(_select(artifact, timed, checks, connection.label, response.noise), emulator)
    report = _report(artifact, connection.label, response, results, checks, selection, time.monotonic() - started)
    series = conditions.series(response, seen) if how.duration_s else ()
    report = report.model_copy(update={"conditions": conditions.conditions(seen), "series": series})
    path = _write(artifact, report)
    if selection is not None and select and emulated.changes(before, selection, emulator):
        artifact.write_selection(selection)
    return Validated(report, path, selection)


def _measure(
    artifact: Artifact, connection: Connection, folder: str, how: How, asked: Questions, into: Path, progress: Progress
) -> Response:
    manifest = artifact.manifest
    feed = timing_feed(manifest.inputs, manifest.axes, manifest.reference)
    request = Request(
        folder=folder,
        candidates=manifest.candidates,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        feeds=asked.feeds,
        op_libraries=manifest.op_libraries,
        timing=Timing(
            feed,
            rounds=how.rounds,
            calls=how.calls,
            tune=tuple(c.name for c in manifest.candidates),
            mode=_mode(artifact),
            duration_s=how.duration_s,
        ),
        threads=how.threads,
        total_s=_TOTAL_S + (how.duration_s or 0),
        sensors=how.sensors,
    )
    # the runner that the artifact carries, which the application uses too, is the one to prove
    runner = f"{folder}/{RUNNER}" if RUNNER in manifest.files else None
    return measure(connection, request, into, runner=runner, python=how.python, progress=progress, watch=how.watch)


def _result(artifact: Artifact, candidate: Candidate, response: Response, asked: Questions, seen, how: How):
    found = candidate_result(candidate, response, asked, seen)
    drift = conditions.drift_percent(response.runs[candidate.name]) if how.duration_s and not found.failure else None
    return found.model_copy(update={"size_bytes": artifact.manifest.size_bytes(candidate), "drift_percent": drift})


def _mode(artifact: Artifact) -> str:
    """What the build chose by: latency, or the throughput that the profile asks for."""
    selection = artifact.selection()
    return selection.mode if selection else "latency"


def _judge_of(artifact: Artifact, project_file: Path | None) -> Judge:
    """The project's evaluate where the artifact has every case that it asks for; else why the metric is undecided."""
    manifest = artifact.manifest
    if not manifest.metrics.get("reference"):
        project = load_project(project_file) if project_file else _project_of_build(artifact)
        return Judge(None, "", classifier=project is not None and project.classifier)
    if not manifest.cases_complete:
        return Judge(None, "the artifact does not carry all cases: raise limits.cases_mb and build again")
    project = load_project(project_file) if project_file else _project_of_build(artifact)
    if project is None:
        return Judge(None, "the project is not at hand: give it with --project")
    if project.evaluate is None:
        raise DataError(
            "the project has no evaluate, and the artifact was built with one", where=project.source,
            todo="give the project that the artifact was built from",
        )  # fmt: skip
    given = load_attribute(project.evaluate, project.folder, key="evaluate")
    evaluate = taking_nested(given, manifest.input_structure, [spec.name for spec in manifest.inputs])
    return Judge(evaluate, "", base=project.folder, classifier=project.classifier)


def _project_of_build(artifact: Artifact) -> Project | None:
    """The project that `build.json` names, None where the file is not on this machine."""
    named = project_file_of(artifact)
    return load_project(named) if named else None


def _checks(artifact: Artifact, result: CandidateResult, limits: Limits, judging: Judge) -> tuple[Check, ...]:
    """A candidate's checks; one that gave no figures has a single one, which says why."""
    if result.failure is not None:
        # an engine that the device has yet to build says nothing against the artifact
        verdict: Verdict = "undecided" if result.runtime == "tensorrt" else "fail"
        return (Check(name="runs", verdict=verdict, evidence=result.failure),)
    manifest = artifact.manifest
    candidate = manifest.candidate(result.name)
    baseline = manifest.metrics.get("reference", {})
    accuracy = judge.accuracy(result, candidate.tolerance, baseline, limits, classifier=judging.classifier)
    explained = tuple(
        c.model_copy(update={"evidence": f"{c.evidence}: {judging.missing}"})
        if judging.missing and c.verdict == "undecided"
        else c
        for c in accuracy
    )
    return explained + judge.performance(result, limits, size_bytes=manifest.size_bytes(candidate))


def _select(
    artifact: Artifact, results: tuple[CandidateResult, ...], checks: dict[str, tuple[Check, ...]], host: str,
    noise: dict | None,
) -> Selection | None:  # fmt: skip
    passed = [r for r in results if r.failure is None and judge.verdict(checks[r.name]) != "fail"]
    passed = [r for r in passed if not _simulated([r])] or passed  # what was measured comes before what was not
    if not passed:
        return None
    sizes = {c.name: artifact.manifest.size_bytes(c) for c in artifact.manifest.candidates}
    chosen = choice.selection(passed, sizes, decided_by="validate", where=host, noise=noise)
    simulated = _simulated(passed)
    return chosen.model_copy(update={"reason": f"SIMULATED ({simulated}): {chosen.reason}"}) if simulated else chosen


def _simulated(results: Sequence[CandidateResult]) -> str | None:
    """What a stand-in for a runtime said of itself while it gave figures; None where all are the device's."""
    said = [flag["message"] for r in results for flag in r.flags if flag["flag"] == "simulated"]
    return said[0] if said else None


def _report(artifact, host, response, results, checks, selection, seconds: float) -> Report:
    chosen = selection.candidate if selection else None
    every = tuple(
        check.model_copy(update={"name": f"{name}: {check.name}"}) for name, of in checks.items() for check in of
    )
    target = _target_check(artifact.manifest.target.get("arch"), response.environment.get("machine"))
    simulated, emulator = _simulated(results), emulated.said(response.environment)
    target += emulated.check(emulator)
    if simulated:
        target += (Check(name="simulated", verdict="undecided", evidence=f"{simulated}: no figures of the device"),)
    verdict = _verdict(checks, chosen)
    return Report(
        artifact=artifact.manifest.name,
        digest=artifact.digest,
        profile=artifact.manifest.profile,
        host=host,
        when_utc=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        verdict="undecided" if verdict == "pass" and target else verdict,
        chosen=chosen,
        reason=selection.reason if selection else _why_none(checks),
        checks=(*target, *every),
        candidates=results,
        environment={**response.environment, "noise": response.noise},
        simulated=simulated,
        emulated=emulator,
        seconds=round(seconds, 3),
    )


def _target_check(wanted: str | None, machine: str | None) -> tuple[Check, ...]:
    """A check where the device is not of the architecture that the artifact was built for: its times prove nothing."""
    if wanted is None or machine is None or wanted == machine:
        return ()
    evidence = f"the device is {machine} and the artifact is for {wanted}: what it measured says nothing of the target"
    return (Check(name="target architecture", verdict="undecided", evidence=evidence),)


def _verdict(checks: dict[str, tuple[Check, ...]], chosen: str | None) -> Verdict:
    """That of the chosen candidate; without one 'fail', unless all that is left waits for its engine."""
    if chosen is not None:
        return judge.verdict(checks[chosen])
    waiting = any(judge.verdict(of) == "undecided" for of in checks.values())
    return "undecided" if waiting else "fail"


def _why_none(checks: dict[str, tuple[Check, ...]]) -> str:
    parts = [f"{name}: " + "; ".join(c.evidence for c in of if c.verdict != "pass") for name, of in checks.items()]
    return "no candidate passes: " + " | ".join(parts)


def _write(artifact: Artifact, report: Report) -> Path:
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", report.host)
    stamp = report.when_utc.replace("-", "").replace(":", "")
    mode = report.conditions.power_mode if report.conditions else None
    name = f"{stamp}-{host}" + (f"-{mode}" if mode else "")
    path = artifact.folder / REPORTS_DIR / f"{name}.json"
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as why:
        raise ArtifactError(
            f"cannot write the report: {why.strerror}", where=str(path.parent), todo="check the folder's permissions"
        ) from None
    path = _free(path)
    replace_file(path, report.model_dump_json(indent=1).encode())
    return path


def _free(path: Path) -> Path:
    """`path`, or with a number where a report of the same second stands there: each is kept, the newest sorts last."""
    numbered = (path.with_name(f"{path.stem}_{n:02d}.json") for n in itertools.count(2))
    return path if not path.exists() else next(p for p in numbered if not p.exists())


def _error(report: Report, path: Path) -> EdgeoptError:
    failures = [c.failure for c in report.candidates if c.failure]
    for failure in failures:
        if failure.startswith("space:"):
            return SpaceError(failure.removeprefix("space: "), where=report.host, todo="free space there and try again")
    if len(failures) == len(report.candidates) and all(f.startswith("missing-runtime:") for f in failures):
        return DeviceError(
            "the device can run no candidate: " + "; ".join(f.removeprefix("missing-runtime: ") for f in failures),
            where=report.host, todo="install one of them there, or name an interpreter that has it with --python",
        )  # fmt: skip
    return ValidationError(
        report.reason, where=f"{report.host}, report {path}",
        todo="loosen the limit if it is too strict, or build other candidates",
    )  # fmt: skip
