"""Bisect: the first pass of the table, or the first candidate, at which an output leaves its tolerance, and the node.

The points of a build are its program after capture, after each pass that changed it, and after quantization. The
first wrong one is found by bisection, and in it the first node by comparing the graph with the one before. Where all
of them hold, the candidates are run, here or on a device, and a wrong one is opened: values inside are written as
further outputs of its file, a few in each round, until the first wrong one stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgeopt import digest
from edgeopt.errors import ArtifactError, EdgeoptError, UsageError
from edgeopt.flows.bisect_calls import Call, Tensors, calls_of
from edgeopt.flows.bisect_candidate import Culprit, Machine, first_place, outputs
from edgeopt.flows.build import WORKDIR, workdir_lock
from edgeopt.flows.project import find_project, project_file_of
from edgeopt.pipeline import op_files
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.progress import Progress, log
from edgeopt.runtime.artifact import Artifact
from edgeopt.runtime.compare import Error, output_errors, reasons_against
from edgeopt.spec.manifest import FILE_NAME, Candidate, Tolerance
from edgeopt.spec.overrides import parse_overrides
from edgeopt.spec.profile import load_profile

MAX_ABS = 1e-3  # of a float point; what a float candidate may differ by too
SQNR_DB = 20.0  # of an integer point, as the gates ask without an evaluate
STAGES = ("optimize", "reoptimize")


@dataclass(frozen=True)
class How:
    """What to compare with what. `until`: how far the build is followed. `candidate`: the only one to run.

    `against`: an artifact whose answers are the right ones; None for the unoptimised model's. `inputs`: a .npz file
    with the call that goes wrong. `kept`: passes that the build would drop are kept, to see where they go wrong.
    """

    until: str = "optimize"
    against: Artifact | None = None
    inputs: Path | None = None
    kept: bool = False
    candidate: str | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class Tried:
    """A point or candidate that was run: its largest error over the calls, and why that is too much, or None."""

    name: str
    max_abs: float
    sqnr_db: float
    reason: str | None
    call: str


@dataclass(frozen=True)
class Finding:
    """`first`: the first wrong point or candidate, None where all hold; `culprit` the first wrong value in it.

    `setting` turns it off. `dropped`: passes that the build leaves out by itself, with the reason.
    """

    tried: tuple[Tried, ...]
    calls: tuple[str, ...]
    first: str | None = None
    culprit: Culprit | None = None
    note: str = ""
    setting: str = ""
    dropped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Point:
    name: str
    program: Any
    setting: str = ""


@dataclass(frozen=True)
class _Stages:
    """The build's stages as they are stored: what is made after a pass that every build drops has keys of its own."""

    job: Job
    cache: StageCache
    keys: dict[str, str]

    @classmethod
    def of(cls, job: Job, how: How) -> _Stages:
        keys = stage_keys(job)
        if how.kept:
            keys = {name: key if name == "capture" else digest.of_value(["kept", key]) for name, key in keys.items()}
        return cls(job, StageCache(job.workdir / "cache"), keys)

    def run(self, name: str, program: Any) -> tuple[Any, Any]:
        """The stage's program and record."""
        from edgeopt.pipeline.stages import STAGES as TABLE
        from edgeopt.pipeline.stages import run_stage

        stage = next(stage for stage in TABLE if stage.name == name)
        return run_stage(stage, program, self.job, self.cache, self.keys[name])


def job_for(
    target: str | None, profile_name: str | None, project_path: str | None, settings: Sequence[str], progress: Progress
) -> Job:
    """The build to follow: that of a MODEL, of a project, or of an ARTIFACT whose project is on this machine.

    Raises UsageError where no profile is named, ArtifactError where an artifact's project is not at hand.
    """
    project_overrides, profile_overrides = parse_overrides(settings)
    artifact = Artifact.open(target) if target is not None and (Path(target) / FILE_NAME).is_file() else None
    if artifact is not None:
        project_path = project_path or _project_of(artifact)
        profile_name = profile_name or artifact.manifest.profile
        target = None
    if profile_name is None:
        raise UsageError("no profile is named", where="--profile", todo="name the profile of the build: --profile NAME")
    project = find_project(target, Path(project_path or "."), project_overrides)
    profile = load_profile(profile_name, profile_overrides)
    return Job(profile=profile, project=project, workdir=project.folder / WORKDIR, progress=progress)


def _project_of(artifact: Artifact) -> str:
    named = project_file_of(artifact)
    if named is None:
        raise ArtifactError(
            "the project that it was built from is not on this machine", where=str(artifact.folder),
            todo="name its project file: --project FILE",
        )  # fmt: skip
    return named


def bisect(job: Job, how: How, machine: Machine) -> Finding:
    """Follow the build of `job` up to `how.until` and find where its answers part from the right ones.

    Raises UsageError for a stage that does not exist, DataError for inputs that do not fit, and what stages raise.
    """
    if how.until not in STAGES:
        raise UsageError(f"'{how.until}' is no stage to follow", where="--until", todo="one of: " + ", ".join(STAGES))
    op_files.check(job)
    machine.connection.run(["true"])  # a device that cannot be reached is told before the work begins
    with workdir_lock(job.workdir):
        return _bisect(job, how, machine)


def _bisect(job: Job, how: How, machine: Machine) -> Finding:
    stages = _Stages.of(job, how)
    points, dropped = _points(stages, how)
    calls = calls_of(points[0].program, job, machine, given=how.inputs, against=how.against)
    seen: dict[str, Tried] = {}
    bad = _first_bad(points, partial(_try_point, calls=calls, how=how, seen=seen))
    words = tuple(call.words for call in calls)
    if bad is None:
        found = _first_bad_candidate(points, calls, stages, how, machine, seen)
    elif bad == 0:
        note = "the model itself gives other answers than the artifact" if how.against else "the capture is at fault"
        found = Finding((), words, points[0].name, note=note)
    else:
        before, after = points[bad - 1 : bad + 1]
        found = _inside_a_pass(before, after, _failing(seen[after.name], calls), how)
    order = [*(p.name for p in points), *seen]
    tried = tuple(sorted(seen.values(), key=lambda t: order.index(t.name)))
    return Finding(tried, words, found.first, found.culprit, found.note, found.setting, dropped)


def _points(stages: _Stages, how: How) -> tuple[list[_Point], tuple[tuple[str, str], ...]]:
    """The programs of the build in order, and the passes that it drops."""
    from edgeopt.pipeline.stages import dropped, followed

    job = stages.job
    program, _ = stages.run("capture", None)
    points, records = [_Point("capture", program)], []
    for name in ("optimize", "reoptimize") if how.until == "reoptimize" else ("optimize",):
        if name == "reoptimize":
            for step in ("qat", "quantize"):
                program, record = stages.run(step, program)
            if not getattr(program, "integer", False):
                log.warning("there is no integer program: %s", record.skipped or record.details.get("refused"))
                break
            points.append(_Point("quantize", program, "profile.precision.allowed=[fp32]"))
        without = {} if how.kept else dropped(stages.run(name, program)[1])

        def watch(step: str, changed: Any, stage: str = name) -> None:
            if step != "start":
                points.append(_Point(f"{stage}/{step}", changed, f"profile.passes.{step}=off"))

        program, found = followed(name, program, job, watch=watch, verified=not how.kept, without=without)
        records += [(f"{name}/{r.name}", without.get(r.name, r.reason)) for r in found if _is_dropped(r, without)]
    return points, tuple(records)


def _is_dropped(record: Any, by_build: Mapping[str, str]) -> bool:
    return record.status == "dropped" or record.name in by_build


def _first_bad(points: Sequence[_Point], good: Callable[[_Point], bool]) -> int | None:
    """The index of the first wrong point by bisection, given that what is wrong stays wrong; None where the last holds.

    A fault that a later point hides again is found where it hides, which is as good a place to look at.
    """
    if good(points[-1]):
        return None
    low, high = -1, len(points) - 1  # low holds, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(points[middle]) else (low, middle)
    return high


def _try_point(point: _Point, *, calls: list[Call], how: How, seen: dict[str, Tried]) -> bool:
    from edgeopt.program.predict import predictor

    if point.name not in seen:
        predict = predictor(point.program)
        seen[point.name] = _judged(point.name, calls, lambda call: predict(call.inputs), _within(point.program, how))
    return seen[point.name].reason is None


def _within(program: Any, how: How) -> Tolerance:
    if getattr(program, "integer", False):
        return Tolerance(sqnr_db=SQNR_DB)
    return Tolerance(max_abs=MAX_ABS if how.max_abs is None else how.max_abs)


def _judged(name: str, calls: list[Call], run: Callable[[Call], Tensors], within: Tolerance) -> Tried:
    """The worst call's verdict; what fails to run, or gives another shape, has left every tolerance."""
    worst: Tried | None = None
    for call in calls:
        try:
            errors = output_errors([call.wanted], [run(call)])
        except EdgeoptError as why:
            return Tried(name, float("inf"), float("-inf"), why.what, call.words)
        except Exception as why:  # whatever the graph's operators raise
            return Tried(name, float("inf"), float("-inf"), f"{type(why).__name__}: {why}", call.words)
        tried = _tried(name, call.words, errors, within)
        if worst is None or (tried.reason is not None, tried.max_abs) > (worst.reason is not None, worst.max_abs):
            worst = tried
    return worst


def _tried(name: str, words: str, errors: dict[str, Error], within: Tolerance) -> Tried:
    return Tried(
        name,
        max((e.max_abs for e in errors.values()), default=0.0),
        min((e.sqnr_db for e in errors.values()), default=float("inf")),
        "; ".join(reasons_against(errors, within)) or None,
        words,
    )


def _failing(tried: Tried, calls: list[Call]) -> Call:
    return next(call for call in calls if call.words == tried.call)


def _inside_a_pass(before: _Point, after: _Point, call: Call, how: How) -> Finding:
    from edgeopt.passes.difference import first_difference

    within = _within(after.program, how)
    found = first_difference(before.program, after.program, call.inputs, within)
    if found is None:
        return Finding((), (), after.name, note="no single node parts from the graph before", setting=after.setting)
    culprit = Culprit.of_difference(found, call.words)
    setting = after.setting
    if after.name == "quantize" and culprit.module:
        setting = f"project.keep_float=[{culprit.module}]"
    return Finding((), (), after.name, culprit, setting=setting)


def _first_bad_candidate(
    points: list[_Point], calls: list[Call], stages: _Stages, how: How, machine: Machine, seen: dict[str, Tried]
) -> Finding:
    """The first candidate that parts from its own program, opened."""
    job = stages.job
    last_float = [p for p in points if not getattr(p.program, "integer", False)][-1]
    lowered = [last_float] + ([points[-1]] if points[-1] is not last_float else [])
    chosen = 0
    for point in lowered:
        for candidate in _candidates(point, stages, machine.scratch):
            if how.candidate not in (None, candidate.name):
                continue
            chosen += 1
            name = f"{candidate.name} on {machine.connection.label}"
            within = candidate.tolerance if how.max_abs is None else Tolerance(max_abs=how.max_abs)
            if within == Tolerance():
                within = _within(point.program, how)
            run = partial(_run_candidate, point.program, candidate, job, machine)
            seen[name] = _judged(name, calls, run, within)
            if seen[name].reason is not None:
                call = _failing(seen[name], calls)
                setting = _without(candidate, job)
                culprit, note = first_place(point.program, candidate, job.profile, call.inputs, within, machine)
                culprit = culprit and replace(culprit, call=call.words)
                return Finding((), (), name, culprit, note, setting)
    if how.candidate is not None and not chosen:
        raise UsageError(
            f"there is no candidate '{how.candidate}' to run", where="--candidate",
            todo="'edgeopt build' lists the candidates, and says why others are refused",
        )  # fmt: skip
    return Finding((), ())


def _run_candidate(program: Any, candidate: Candidate, job: Job, machine: Machine, call: Call) -> Tensors:
    return outputs(program, candidate, job.profile, call.inputs, machine)


def _candidates(point: _Point, stages: _Stages, scratch: Path) -> list[Candidate]:
    """What the backends of the profile would ship; one whose file was refused for its answers is among them."""
    from edgeopt.backends.equality import OTHER_VALUES
    from edgeopt.pipeline import lowering

    stage = "reoptimize" if getattr(point.program, "integer", False) else "optimize"
    folder = scratch / f"lowered-{stage}"
    folder.mkdir(exist_ok=True)
    found = lowering.lower(point.program, stages.job, stages.cache, f"bisect {stages.keys[stage]} {point.name}", folder)
    refused = []
    for refusal in found.refused:
        runtime, _, precision = refusal.candidate.rpartition("-")
        if OTHER_VALUES in refusal.reason and runtime in ("onnxruntime", "torchscript"):
            refused.append(Candidate(name=refusal.candidate, runtime=runtime, precision=precision, file="refused"))
        else:
            log.info("%s is left out: %s", refusal.candidate, refusal.reason)
    return [*found.candidates, *refused]


def _without(candidate: Candidate, job: Job) -> str:
    """The setting that leaves the candidate's backend out, where another is left."""
    others = [name for name in job.profile.backends if name != candidate.runtime]
    return f"profile.backends=[{', '.join(others)}]" if others else ""
