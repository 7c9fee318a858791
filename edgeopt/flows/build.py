"""Build: from a project and a profile to an artifact, stage by stage, with two gates."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgeopt import digest
from edgeopt.errors import ArtifactError, EdgeoptError, LockedError, LoweringError, UsageError, disk_error
from edgeopt.pipeline import heads, helping, op_files, torchrun
from edgeopt.pipeline.cache import StageCache, link_or_copy
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys, tool_versions
from edgeopt.pipeline.stages import INTEGER_STAGES, STAGE_NAMES, STAGES, StageRecord, run_stage
from edgeopt.runtime.artifact import Artifact, publish, read_manifest, replace_file
from edgeopt.spec.manifest import BUILD_NAME, FILE_NAME, SELECTION_NAME, Refusal, Selection, belongs_to
from edgeopt.spec.project import Project

WORKDIR = ".edgeopt"


@dataclass(frozen=True)
class Built:
    """What a build gave: the artifact (None with `until`), the selection, and the record of `build.json`."""

    artifact: Artifact | None
    selection: Selection | None
    record: dict[str, Any]


@dataclass(frozen=True)
class Listener:
    """Who is told what happens, as it happens."""

    stage: Callable[[StageRecord], None] = lambda record: None
    gate: Callable[[str, Any], None] = lambda name, row: None
    refused: Callable[[Refusal], None] = lambda refusal: None
    tried: Callable[[Any], None] = lambda made: None


def build(
    job: Job,
    out: Path,
    *,
    until: str | None = None,
    use_cache: bool = True,
    listener: Listener | None = None,
    budget_min: float | None = None,
) -> Built:
    """Build the artifact `out`, or stop after the stage `until`.

    Nothing stands at `out` until everything is done; a killed build resumes at the last finished stage. `budget_min`:
    minutes for the search for mixed precision where int8 does not keep the limits, 0 for none, None for the default
    of `pipeline.mixed`; Ctrl-C in the search ends it and not the build. Raises LoweringError where no candidate keeps
    the limits, and whatever a stage raises.
    """
    if until is not None and until not in STAGE_NAMES:
        raise UsageError(f"there is no stage '{until}'", where="--until", todo="one of: " + ", ".join(STAGE_NAMES))
    if torchrun.helps():
        return Built(None, None, helping.help_train(job))
    _check_out(out, job)
    op_files.check(job)
    with workdir_lock(job.workdir), torchrun.helpers_leave():
        keys = stage_keys(job)
        cache = StageCache(job.workdir / "cache", enabled=use_cache)
        listener = listener or Listener()
        if until is None and (built := _cached(cache, keys["build"], out)):
            return built
        return _Build(job, cache, keys, out, listener, budget_min).run(until)


class _Build:
    """One run: opened by `run`, which leaves either an artifact or nothing."""

    def __init__(
        self, job: Job, cache: StageCache, keys: dict[str, str], out: Path, listener: Listener, budget_min=None
    ):
        self._job, self._cache, self._keys, self._out, self._listener = job, cache, keys, out, listener
        self._budget_min, self._mixed, self._unoptimised = budget_min, None, None
        self._stages: list[StageRecord] = []
        self._started = time.perf_counter()

    def run(self, until: str | None) -> Built:
        if until is not None:
            self._stages_until(until)
            return Built(None, None, self._record((), None))
        with _staging(self._out) as staging:
            return self._build_in(staging)

    def _stages_until(self, until: str) -> None:
        program = None
        for stage in STAGES[: STAGE_NAMES.index(until) + 1]:
            if not stage.branch or stage.name == until:
                program = self._stage(stage, program)

    def _stage(self, stage, program):
        program, record = run_stage(stage, program, self._job, self._cache, self._keys[stage.name])
        self._stages.append(record)
        self._listener.stage(record)
        return program

    def _build_in(self, staging: Path) -> Built:
        from edgeopt.pipeline import assemble, lowering
        from edgeopt.pipeline.baseline import CASES_FILE, baseline
        from edgeopt.pipeline.gates import fastest_float, mendable

        job, by_name = self._job, {stage.name: stage for stage in STAGES}
        plain = captured = self._stage(by_name["capture"], None)
        captured = heads.on(captured, job.project)
        judged_by = baseline(captured, job, self._cache, self._keys["capture"])
        self._unoptimised = {
            "metrics": judged_by.metrics,
            "intervals": {name: found.model_dump(mode="json") for name, found in judged_by.intervals.items()},
        }
        if judged_by.folder:
            link_or_copy(judged_by.folder / CASES_FILE, staging / CASES_FILE)
        reference = assemble.write_reference(captured, staging)

        optimized = self._stage(by_name["optimize"], plain)
        lowered = lowering.lower(heads.on(optimized, job.project), job, self._cache, self._keys["optimize"], staging)
        halves = [self._half(stage, optimized, staging) for stage in STAGES if stage.branch]
        gate = partial(self._gate, staging, captured=captured, reference=reference, judged_by=judged_by)
        floats = [lowered, *halves]
        rows = last = gate("after optimize", tuple(c for f in floats for c in f.candidates), rounds=3, calls=15)
        recipes, refused = [r for f in floats for r in f.recipes], [r for f in floats for r in f.refused]

        integer, trained = optimized, optimized
        for name in INTEGER_STAGES:
            integer = self._stage(by_name[name], integer)
            trained = integer if name == "qat" else trained
        if integer is not optimized and integer.integer:
            headed = heads.on(integer, job.project)
            lowered = lowering.lower(headed, job, self._cache, self._keys["reoptimize"], staging)
            # the best float again, so that integer and float are timed in one interleaved run
            again = fastest_float(rows, {row.candidate.name: row.facts.size_bytes for row in rows})
            programs = {candidate.name: headed for candidate in lowered.candidates}
            last = gate("after reoptimize", again + lowered.candidates, rounds=5, calls=40, programs=programs)
            if mendable(last) and (
                searched := self._search(staging, optimized, trained, captured, reference, judged_by, rows, last)
            ):
                headed, lowered = searched
                programs = {candidate.name: headed for candidate in lowered.candidates}
                last = gate("after the search", again + lowered.candidates, rounds=5, calls=40, programs=programs)
            recipes, refused = [*recipes, *lowered.recipes], [*refused, *lowered.refused]
            newer = {row.candidate.name: row for row in last}
            rows = tuple(newer.pop(row.candidate.name, row) for row in rows) + tuple(newer.values())
        else:
            refused.append(Refusal(candidate="int8", reason=_why_no_integers(self._stages)))

        kept = tuple(row for row in rows if row.kept)
        refused += [Refusal(candidate=r.candidate.name, reason=r.reason) for r in rows if not r.kept]
        for refusal in refused:
            self._listener.refused(refusal)
        if not kept:
            raise _nothing_left(refused, job)
        made = assemble.manifest(staging, captured, job, reference, judged_by, kept, tuple(recipes), tuple(refused))
        to_choose = tuple(row for row in last if row.kept) or kept
        return self._publish(staging, made, to_choose, rows)

    def _search(self, staging, optimized, trained, captured, reference, judged_by, floats, last):
        """The program of mixed precision and its files in `staging`; None where none is needed or none was found."""
        from edgeopt.pipeline import lowering
        from edgeopt.pipeline.mixed_build import search_for
        from edgeopt.pipeline.tries import Ground

        training_s = sum(record.details.get("seconds", 0.0) for record in self._stages if record.name == "qat")
        ground = Ground(
            self._job, optimized, self._keys["optimize"], trained if trained is not optimized else None,
            self._keys["qat"], training_s, captured.signature, reference, judged_by, staging,
        )  # fmt: skip
        found = search_for(ground, floats, last, self._budget_min, self._keys["build"], self._listener.tried)
        if found is None:
            return None
        self._mixed, program, key, profile = found
        if program is None:
            return None
        job = dataclasses.replace(self._job, profile=profile)
        for path in [
            p
            for p in staging.iterdir()
            if any(belongs_to(p.name, r.candidate.file) for r in last if r.candidate.precision == "int8")
        ]:
            path.unlink()  # a link into the cache, which must not be written through
        headed = heads.on(program, job.project)
        return headed, lowering.lower(headed, job, self._cache, key, staging)

    def _half(self, stage, optimized, staging: Path):
        """The candidates of the program in the stage's 16-bit precision, where the profile allows it."""
        from edgeopt.pipeline import lowering

        precision = stage.name
        if precision not in self._job.profile.precision.allowed:
            return lowering.Files((), (), (), ())
        program = self._stage(stage, optimized)
        if program is not optimized and program.half:
            headed = heads.on(program, self._job.project)
            return lowering.lower(headed, self._job, self._cache, self._keys[precision], staging)
        record = self._stages[-1]
        failed = record.skipped or record.details["half"]["refused"]
        takers = lowering.half_takers(precision, self._job)
        refused = [Refusal(candidate=f"{b}-{precision}", reason=why or failed) for b, why in takers.items()]
        return lowering.Files((), (), (), tuple(refused))

    def _gate(self, staging, name, candidates, *, captured, reference, judged_by, **how):
        from edgeopt.pipeline.gates import run_gate

        if not candidates:
            return ()
        rows = run_gate(staging, candidates, captured.signature, reference, judged_by, self._job, **how)
        for row in rows:
            self._listener.gate(name, row)
        return rows

    def _publish(self, staging: Path, manifest, kept, rows) -> Built:
        from edgeopt.pipeline.gates import choose

        sizes = {c.name: manifest.size_bytes(c) for c in manifest.candidates}
        selection = choose(kept, self._job.profile, sizes, self._job.device)
        record = self._record(rows, selection, manifest.refused)
        replace_file(staging / SELECTION_NAME, digest.canonical_json(selection.model_dump(mode="json")))
        replace_file(staging / BUILD_NAME, json.dumps(record, indent=1, default=str, allow_nan=False).encode())
        artifact = publish(staging, self._out, manifest)
        if self._mixed is None or not self._mixed.ended:  # else building again goes on with the search
            self._cache.store("artifact", self._keys["build"], lambda part: _copy_artifact(artifact, part))
        return Built(artifact, selection, record)

    def _record(self, rows, selection: Selection | None, refused: tuple[Refusal, ...] = ()) -> dict[str, Any]:
        record = {
            "key": self._keys["build"],
            "project": str(_project_file(self._job.project)),
            "profile": self._job.profile.name,
            "tools": tool_versions(),
            "seconds": round(time.perf_counter() - self._started, 3),
            "stages": [dataclasses.asdict(record) for record in self._stages],
            "candidates": [
                {
                    "name": row.candidate.name, "kept": row.kept, "reason": row.reason, "stand_in": row.stand_in,
                    "result": row.result.model_dump(mode="json"), "noise": row.noise,
                    "checks": [check.model_dump(mode="json") for check in row.checks],
                    "facts": dataclasses.asdict(row.facts),
                }
                for row in rows
            ],
            "refused": [refusal.model_dump(mode="json") for refusal in refused],
            "measured_on": {"host": self._job.device.label, **self._job.device.facts} if self._job.device else None,
            "unoptimised": self._unoptimised,
            "mixed_precision": dataclasses.asdict(self._mixed) if self._mixed else None,
            "selection": selection.model_dump(mode="json") if selection else None,
        }  # fmt: skip
        return digest.finite(record)


def _why_no_integers(stages: list[StageRecord]) -> str:
    """The reason of the last integer stage that did not run, or that refused what it made."""
    reasons = [r.skipped or r.details.get("refused") for r in stages if r.name in ("qat", "quantize")]
    return next(filter(None, reversed(reasons)))


def _project_file(project: Project) -> Path:
    """The absolute path of the project's file, for `validate`, whose evaluate it finds there."""
    return project.folder / Path(project.source.partition(" with --set ")[0]).name


def _cached(cache: StageCache, key: str, out: Path) -> Built | None:
    """The artifact of an unchanged build, verified, and put at `out` again where it is gone or was changed."""
    found = cache.find("artifact", key)
    if found is None:
        return None
    manifest = read_manifest(found)
    record = json.loads((found / BUILD_NAME).read_bytes()) | {"cached": True}
    try:
        artifact = Artifact.open(out)
        if artifact.manifest != manifest:
            artifact = None
    except ArtifactError:
        artifact = None
    if artifact is None:
        with _staging(out) as staging:
            _copy_artifact(Artifact(found, manifest), staging, link=False)
            artifact = publish(staging, out, manifest)
    return Built(artifact, artifact.selection(), record)


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder beside `out` to build in, gone afterwards; what a killed build left behind goes too."""
    import psutil

    prefix = f".{out.name}.part-"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f"{glob.escape(prefix)}*"):
            owner = left.name.removeprefix(prefix).partition("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=out.parent))
    except OSError as why:
        raise disk_error(why, out.parent) from why
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_artifact(artifact: Artifact, folder: Path, *, link: bool = True) -> None:
    for name in (*artifact.manifest.files, FILE_NAME, SELECTION_NAME, BUILD_NAME):
        if link:
            link_or_copy(artifact.folder / name, folder / name)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact.folder / name, folder / name)


def _check_out(out: Path, job: Job) -> None:
    """Refuse to replace what is no artifact, or the artifact of another name or profile."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ArtifactError("a file is in the way of the artifact", where=str(out), todo="give another --out")
    if not any(out.iterdir()):
        return
    try:
        manifest = read_manifest(out)
    except ArtifactError as why:
        if (out / FILE_NAME).exists():
            return  # a damaged artifact: replaced
        raise ArtifactError(
            "the output folder holds something else", where=str(out), todo="give another --out"
        ) from why
    if manifest.name != job.project.name or manifest.profile.split("@")[0] != job.profile.name.split("@")[0]:
        raise ArtifactError(
            f"an artifact of '{manifest.name}' for '{manifest.profile}' stands there", where=str(out),
            todo="give another --out, or remove it",
        )  # fmt: skip


@contextlib.contextmanager
def workdir_lock(workdir: Path) -> Iterator[None]:
    """One build at a time in a project's folder; the lock goes with the process that holds it."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / "lock", "w")  # noqa: SIM115  held for the time of the block
    except OSError as why:
        raise EdgeoptError(
            f"cannot write: {why.strerror}", where=str(workdir), todo="build in a folder that you may write to"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LockedError(
                "another build of this project is running", where=str(workdir), todo="wait for it to end"
            ) from None
        yield


def _nothing_left(refused: list[Refusal], job: Job) -> LoweringError:
    lines = "\n".join(f"  - {r.candidate}: {r.reason}" for r in refused)
    return LoweringError(
        f"no candidate can be shipped:\n{lines}", where=f"{job.project.source}, profile {job.profile.name}",
        todo="loosen the limits, or choose other backends in the profile",
    )  # fmt: skip
