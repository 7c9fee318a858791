"""Bench: an artifact's candidates and other runtimes timed in one run, each in a process of its own, in turns.

The other runtimes run the user's own model at their defaults (see pipeline.peers); ours run with what the device was
found to be best at. Everything is measured by the runner, and compared with the outputs of the model in eager mode.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import edgeopt
from edgeopt.device import intervals, session
from edgeopt.device.intervals import Estimate
from edgeopt.device.measured import Questions, busy, candidate_result, timing_feed
from edgeopt.device.runner import Request, Timing, measure
from edgeopt.errors import EdgeoptError, UsageError
from edgeopt.flows.build import WORKDIR, workdir_lock
from edgeopt.flows.project import find_project
from edgeopt.pipeline import assemble, op_files
from edgeopt.pipeline.cache import StageCache, link_or_copy
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.pipeline.peers import ANYWHERE, PEERS
from edgeopt.pipeline.stages import STAGES, run_stage
from edgeopt.ports.connection import Connection
from edgeopt.ports.local import LocalConnection
from edgeopt.program import Program
from edgeopt.progress import SILENT, Progress
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import BUILD_NAME, FILE_NAME, Axis, Candidate, Feed, TensorSpec
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import Project
from edgeopt.spec.report import CandidateResult
from edgeopt.spec.values import did_you_mean

USUAL = ("eager", "compile", "onnxruntime", "openvino")  # of a model without an artifact
_OPSET = 17  # what the ONNX contenders' file is written for: every onnxruntime and OpenVINO of the last years reads it
_CHILD = "edgeopt.flows.bench_child"
_PEER = "peer."  # before the names of peers while they are measured: a candidate may be called onnxruntime-int8 too


@dataclass(frozen=True)
class Asked:
    """What to bench. `target` is an artifact's folder or a MODEL, None for the project at `project`.

    `against`: names of pipeline.peers.PEERS, None for none beside an artifact's candidates and else `USUAL`.
    """

    target: str | None = None
    project: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    against: tuple[str, ...] | None = None
    mode: Literal["latency", "throughput"] = "latency"
    rounds: int = 7
    calls: int = 50
    max_s: float = 20
    python: str = "python3"
    root: str = "~/.edgeopt"


@dataclass(frozen=True)
class Row:
    """One contender: its figures or `result.failure`; `ratio` is its time over the first row's, pair by pair."""

    result: CandidateResult
    ours: bool
    ratio: Estimate | None = None


@dataclass(frozen=True)
class Benched:
    """The rows in the order asked for, where and how they were taken, and why the times are uncertain, or None."""

    name: str
    host: str
    mode: str
    rows: tuple[Row, ...]
    noise: dict[str, Any] | None
    environment: dict[str, Any]
    uncertain: str | None

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON data."""
        rows = [
            {"ours": r.ours, "ratio": vars(r.ratio) if r.ratio else None, **r.result.model_dump(mode="json")}
            for r in self.rows
        ]  # fmt: skip
        return {**vars(self), "rows": rows}


class _Contender(Candidate):
    """A candidate that no artifact holds."""

    runtime: str


@dataclass(frozen=True)
class _Ground:
    """What is measured: files in `folder`, the calls, and the candidates of an artifact (none of a model)."""

    name: str
    folder: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, Axis]
    feeds: tuple[Feed, ...]
    candidates: tuple[Candidate, ...] = ()
    op_libraries: tuple[str, ...] = ()
    classifier: bool = False
    model: str | None = None  # and `project`: as find_project takes them
    project: Path | None = None

    @property
    def timed(self) -> int:
        """The index of the call that is timed."""
        return int(timing_feed(self.inputs, self.axes, self.feeds).rpartition("/")[2])


def bench(asked: Asked, connection: Connection, *, progress: Progress = SILENT) -> Benched:
    """Measure on the device behind `connection`. A contender that fails is a row with its reason.

    Raises UsageError for a contender that does not exist, and whatever opening the artifact or capturing the model
    raises.
    """
    _check_names(asked.against or ())
    with tempfile.TemporaryDirectory(prefix="edgeopt-bench-") as scratch:
        ground, peers, failures = _prepare(asked, Path(scratch), isinstance(connection, LocalConnection), progress)
        contenders = [*ground.candidates, *peers]
        sizes = _sizes(ground.feeds[ground.timed])
        feeds = tuple(f for f in ground.feeds if _sizes(f) == sizes)  # AOTInductor's package takes no others
        questions = Questions(ground.folder, feeds, (), None, classifier=ground.classifier, mode=asked.mode)
        with session.opened(connection, python=asked.python, root=asked.root) as device:
            tensors = {ref.file for feed in feeds for ref in feed.inputs.values()}
            files = session.files_of(ground.folder, {*(c.file for c in contenders), *tensors, *ground.op_libraries})
            request = Request(
                folder=device.holding(ground.folder, files), candidates=contenders, inputs=ground.inputs,
                outputs=ground.outputs, feeds=questions.feeds, op_libraries=ground.op_libraries, timeout_s=900,
                timing=Timing(
                    "reference/0", rounds=asked.rounds, calls=asked.calls, max_s=asked.max_s, mode=asked.mode,
                    tune=tuple(c.name for c in ground.candidates), repeats=asked.rounds,
                ),
            )  # fmt: skip
            response = measure(connection, request, Path(scratch, "out"), python=asked.python, progress=progress)
        ours = [candidate_result(c, response, questions) for c in ground.candidates]
        peers_found = {c.name.removeprefix(_PEER): candidate_result(c, response, questions) for c in peers}
    others = {**peers_found, **{result.name: result for result in failures}}
    rows = _rows(ours, [others[name].model_copy(update={"name": name}) for name in _against(asked)])
    why = busy(response.noise)
    return Benched(ground.name, connection.label, asked.mode, rows, response.noise, response.environment, why)


def _sizes(feed: Feed) -> dict[str, tuple[int, ...]]:
    return {name: ref.shape for name, ref in feed.inputs.items()}


def _rows(ours: list[CandidateResult], others: list[CandidateResult]) -> tuple[Row, ...]:
    """Rows in order; ratios are to the first contender, where that has figures."""
    every = [*ours, *others]
    base = every[0].rounds_ms if every else ()
    ratios = [intervals.ratio(r.rounds_ms, base) if base and r.rounds_ms else None for r in every]
    return tuple(Row(result, i < len(ours), ratio) for i, (result, ratio) in enumerate(zip(every, ratios, strict=True)))


def _against(asked: Asked) -> tuple[str, ...]:
    return asked.against if asked.against is not None else () if _is_artifact(asked.target) else USUAL


def _is_artifact(target: str | None) -> bool:
    return target is not None and (Path(target).expanduser() / FILE_NAME).is_file()


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in PEERS:
            near = did_you_mean(name, list(PEERS))
            hint = f", did you mean '{near}'?" if near else ""
            raise UsageError(f"there is no contender '{name}'{hint}", where="--against", todo="of: " + ", ".join(PEERS))


def _prepare(
    asked: Asked, scratch: Path, here: bool, progress: Progress
) -> tuple[_Ground, list[Candidate], list[CandidateResult]]:
    """The ground with its files in `scratch`, the peers that can run, and those that cannot with their reason."""
    folder = scratch / "files"
    folder.mkdir()
    opened = Artifact.open(Path(asked.target).expanduser()) if _is_artifact(asked.target) else None
    model, path = _project_at(asked, opened)
    wanted = path is not None and (opened is None or _against(asked))
    project = find_project(model, path, asked.overrides) if wanted else None
    program = captured(project, progress) if project is not None else None
    ground = _of_artifact(opened, folder) if opened else _of_program(project, program, folder)
    classifier = project is not None and project.classifier
    ground = dataclasses.replace(ground, classifier=classifier, model=model, project=path)
    peers, failures = [], []
    file = _write(program, folder) if program is not None and any(PEERS[name] for name in _against(asked)) else ""
    for name in _against(asked):
        reason = _reason(name, ground, program, here) or (
            file.what if PEERS[name] and not isinstance(file, str) else None
        )
        if reason is None:
            peers.append(_peer(name, file if PEERS[name] else assemble.REFERENCE_FILE, ground, asked))
        else:
            failures.append(CandidateResult(name=name, runtime=name, precision=_precision(name), failure=reason))
    return ground, peers, failures


def _project_at(asked: Asked, opened: Artifact | None) -> tuple[str | None, Path | None]:
    """(MODEL, where its project is) as find_project takes them; the second None where the artifact's is not at hand."""
    if opened is not None:
        return None, asked.project or _project_of(opened)
    if asked.target is not None and Path(asked.target).expanduser().is_dir():
        return None, Path(asked.target).expanduser()
    return asked.target, asked.project or Path(".")


def _reason(name: str, ground: _Ground, program: Program | None, here: bool) -> str | None:
    """Why a contender cannot take part, None where it can."""
    if program is None:
        return "the project of the artifact is not at hand: give it with --project"
    if not here and name not in ANYWHERE:
        return "it needs the model's own code: run bench on that machine"
    if program.signature.inputs != ground.inputs:
        return "the artifact takes other inputs than the model"
    return None


def _precision(name: str) -> str:
    return "int8" if name.endswith("-int8") else "fp32"


def _peer(name: str, file: str, ground: _Ground, asked: Asked) -> Candidate:
    if name in ANYWHERE:
        return _Contender(name=_PEER + name, runtime="onnxruntime", precision=_precision(name), file=file)
    example = ground.feeds[ground.timed].inputs
    flags = {
        "adaptor": _CHILD, "path": str(Path(edgeopt.__file__).parents[1]), "kind": name, "model": ground.model,
        "project": str(ground.project.resolve()), "overrides": dict(asked.overrides),
        "example": {key: ref.model_dump(mode="json") for key, ref in example.items()},
    }  # fmt: skip
    return _Contender(name=_PEER + name, runtime="python", precision=_precision(name), file=file, flags=flags)


def captured(project: Project, progress: Progress) -> Program:
    """The model as it was captured, from the cache of the project's builds where it is there."""
    job = Job(load_profile("x86-cpu"), project, project.folder / WORKDIR, progress)
    op_files.check(job)
    with workdir_lock(job.workdir):
        return run_stage(STAGES[0], None, job, StageCache(job.workdir / "cache"), stage_keys(job)["capture"])[0]


def _of_artifact(artifact: Artifact, folder: Path) -> _Ground:
    manifest = artifact.manifest
    for name in manifest.files:
        link_or_copy(artifact.folder / name, folder / name)
    selection = artifact.selection()
    first = selection.candidate if selection else manifest.candidates[0].name
    candidates = sorted(manifest.candidates, key=lambda c: c.name != first)  # the chosen one first
    return _Ground(
        manifest.name, folder, manifest.inputs, manifest.outputs, manifest.axes, manifest.reference,
        tuple(candidates), manifest.op_libraries,
    )  # fmt: skip


def _of_program(project: Project, program: Program, folder: Path) -> _Ground:
    signature = program.signature
    feeds = assemble.write_reference(program, folder)
    return _Ground(project.name, folder, signature.inputs, signature.outputs, signature.axes, feeds)


def _write(program: Program, folder: Path) -> str | EdgeoptError:
    """The ONNX file of the captured program, or why there is none."""
    from edgeopt.backends import onnx_export

    (folder / "peers").mkdir()
    try:
        return f"peers/{onnx_export.write(program, folder / 'peers', opset_max=_OPSET).name}"
    except EdgeoptError as why:
        return why


def _project_of(artifact: Artifact) -> Path | None:
    """The project file that `build.json` names, None where it is not on this machine."""
    try:
        named = json.loads((artifact.folder / BUILD_NAME).read_bytes()).get("project")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(named) if named and Path(named).is_file() else None


def failed(benched: Benched) -> Iterator[str]:
    """A line for each contender that gave no figures."""
    return (f"{row.result.name}: {row.result.failure}" for row in benched.rows if row.result.failure)
