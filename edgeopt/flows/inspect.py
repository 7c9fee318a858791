"""Inspect: the graph of a build at any of its points, in figures; `inspect_files` does the same for files."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeopt.errors import UsageError
from edgeopt.flows.build import WORKDIR, workdir_lock
from edgeopt.flows.project import find_project
from edgeopt.pipeline import op_files
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.points import Point, Points
from edgeopt.pipeline.stages import StageRecord
from edgeopt.program.difference import unified
from edgeopt.progress import Progress
from edgeopt.spec.overrides import parse_overrides
from edgeopt.spec.profile import load_profile

MODEL_FILES = (".onnx", ".pt", ".ts", ".jit", ".torchscript")
# what a profile is needed for: its passes; this machine's own stands in where none is named
_OWN_PROFILES = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}


@dataclass(frozen=True)
class Asked:
    """The options: `stage` and `step` (a pass) name one point, `diff` two points, candidates or files."""

    stage: str | None = None
    step: str | None = None
    diff: tuple[str, str] | None = None


@dataclass(frozen=True)
class Inspected:
    """What was found. `stages` are those that ran, `shown` the graph asked for, `files` an artifact's candidates.

    With `diff`, `shown` is its second graph, `before` its first, and `difference` the lines of a unified diff.
    """

    name: str
    profile: str | None
    stages: tuple[StageRecord, ...] = ()
    shown: Any = None
    before: Any = None
    difference: tuple[str, ...] = ()
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    program: Any = None  # of `shown`, where it was made here
    path: Path | None = None  # of `shown`, where it is a file
    usage: tuple[str, ...] = ()  # an artifact's files for pipelines in C++


def target_of(target: str | None, project: str | None, asked: Asked) -> str:
    """What to look into: 'artifact', 'file', 'two files' (named by `diff` alone) or 'project'.

    With a project named, a model file is that project's model.
    """
    if target is None:
        files = asked.diff is not None and project is None and all(_is_model_file(text) for text in asked.diff)
        return "two files" if files else "project"
    if Path(target).expanduser().is_dir():
        return "artifact"
    named = ":" not in target and Path(target).suffix.lower() in MODEL_FILES
    return "file" if named and project is None else "project"


def _is_model_file(text: str) -> bool:
    path = Path(text).expanduser()
    return path.suffix.lower() in MODEL_FILES and path.is_file()


def job_for(
    model: str | None, profile_name: str | None, project_path: str | None, settings: Sequence[str], progress: Progress
) -> Job:
    """The build to look into; without a profile, for this machine's own processor."""
    import platform

    project_overrides, profile_overrides = parse_overrides(settings)
    profile = load_profile(profile_name or _OWN_PROFILES.get(platform.machine(), "x86-cpu"), profile_overrides)
    project = find_project(model, Path(project_path or "."), project_overrides)
    return Job(profile=profile, project=project, workdir=project.folder / WORKDIR, progress=progress)


def inspect_build(
    job: Job, asked: Asked, *, use_cache: bool = True, told: Callable[[StageRecord], None] = lambda record: None
) -> Inspected:
    """The graph at a point of the build, or the difference of two. `told` hears of every stage.

    UsageError for points that do not exist or were left out; else what the stages raise.
    """
    from edgeopt.program.description import describe

    op_files.check(job)
    with workdir_lock(job.workdir):
        points = Points(job, StageCache(job.workdir / "cache", enabled=use_cache), told)
        if asked.diff:
            pair = [points.parse(text, asked.stage) for text in asked.diff]
            before, shown = (describe(points.program(p), str(p), notes=_notes(points, p)) for p in pair)
            return differ(before, shown, name=job.project.name, profile=job.profile.name, stages=tuple(points.records))
        point = _point(points, asked)
        program = points.program(point)
        shown = describe(program, str(point), notes=_notes(points, point))
        return Inspected(job.project.name, job.profile.name, tuple(points.records), shown, program=program)


def as_data(found: Inspected) -> dict[str, Any]:
    """What was found, as JSON data."""
    from edgeopt import digest
    from edgeopt.program.description import as_data as data_of

    data: dict[str, Any] = {"name": found.name, "profile": found.profile}
    data["stages"] = [dataclasses.asdict(record) for record in found.stages]
    data["graph"] = data_of(found.shown) if found.shown is not None and not found.files else None
    data["candidates"] = {
        name: {k: v for k, v in row.items() if k != "description"} | {"graph": data_of(row["description"])}
        for name, row in found.files.items()
    }
    data["before"] = data_of(found.before) if found.before is not None else None
    data["diff"] = list(found.difference) if found.before is not None else None
    return digest.finite(data)


@contextlib.contextmanager
def model_file(found: Inspected, *, folder: Path | None = None) -> Iterator[Path]:
    """The graph shown as a model file: the file that it was read from, else ONNX, written for the time of the block.

    LoweringError where the graph has no ONNX form.
    """
    if found.path is not None:
        yield found.path
        return
    from edgeopt.backends import onnx_export

    with tempfile.TemporaryDirectory(dir=folder) as part:
        file = onnx_export.write(found.program, Path(part), opset_max=onnx_export.EXPORTER_NEWEST)
        yield Path(part) / file.name


def write_text(found: Inspected, path: Path) -> None:
    """The lines of the graph shown, as a file."""
    from edgeopt.runtime.artifact import replace_file

    replace_file(path, ("\n".join(found.shown.lines) + "\n").encode())


def _point(points: Points, asked: Asked) -> Point:
    if asked.step is not None:
        return points.parse(f"{asked.stage}/{asked.step}" if asked.stage else asked.step)
    if asked.stage is None:
        return points.last()
    return points.stage(asked.stage)


def _notes(points: Points, point: Point) -> tuple[str, ...]:
    note = points.note(point)
    return (note,) if note else ()


def differ(before: Any, shown: Any, *, name: str, profile: str | None, stages=()) -> Inspected:
    """Two described graphs and the lines that differ. UsageError where they are graphs of different kinds."""
    kinds = [found.kind.split(" ")[0] for found in (before, shown)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{before.name} is a graph of {kinds[0]} and {shown.name} of {kinds[1]}: they have no line in common",
            where="--diff", todo="compare two of one kind; inspect shows the figures of each",
        )  # fmt: skip
    lines = unified(before.lines, shown.lines, before.name, shown.name)
    return Inspected(name, profile, tuple(stages), shown, before, lines)


def no_points(asked: Asked, what: str) -> None:
    """UsageError where a point of a build is asked of what is no build."""
    if asked.stage is not None or asked.step is not None:
        raise UsageError(
            f"{what} has no stages and passes; the build that made it has", where="--stage, --pass",
            todo="name the project: --project FILE, with --profile NAME",
        )  # fmt: skip
