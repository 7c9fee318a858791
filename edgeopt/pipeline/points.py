"""The points of a build that can be looked at: its program after each stage, and after each pass of a stage.

A point is written STAGE, PASS, or STAGE/PASS; 'start' is the program before the first pass. Stages come through the
cache as in a build; the passes of a stage run anew where a point among them is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edgeopt.errors import UsageError
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.pipeline.stages import STAGE_NAMES, STAGES, StageRecord, dropped, followed, run_stage
from edgeopt.program import ExportedGraph, Program, ScriptGraph
from edgeopt.spec.values import did_you_mean

START = "start"
_GRAPHS = {"optimize": "float", "reoptimize": "integer"}  # the stages that run passes, and the graphs they are for


@dataclass(frozen=True)
class Point:
    """A place in the build; `step` is a pass, 'start', or None for the end of the stage."""

    stage: str
    step: str | None = None

    def __str__(self) -> str:
        return f"{self.stage}/{self.step}" if self.step else self.stage


@dataclass
class Points:
    """The programs of one build, made when they are asked for. `told` is called with each stage's record."""

    job: Job
    cache: StageCache
    told: Callable[[StageRecord], None] = lambda record: None
    records: list[StageRecord] = field(default_factory=list)
    _programs: dict[str, Program] = field(default_factory=dict)
    _inside: dict[str, dict[str, Program]] = field(default_factory=dict)

    def parse(self, text: str, stage: str | None = None) -> Point:
        """The point that `text` names; a pass alone is looked for in `stage`, or in the stages in order.

        UsageError for what is no stage and no pass, with the nearest name.
        """
        first, slash, second = text.partition("/")
        if slash:
            self._check_stage(first, text)
            return self._step(second, (first,), text)
        if first in STAGE_NAMES:
            return Point(first)
        if stage is not None:
            self._check_stage(stage, stage)
        return self._step(first, (stage,) if stage else tuple(_GRAPHS), text)

    def stage(self, name: str) -> Point:
        """The point after a stage. UsageError for what is none."""
        if name not in STAGE_NAMES:
            raise _unknown(f"there is no stage '{name}'", name, STAGE_NAMES, f"--stage {name}")
        return Point(name)

    def program(self, point: Point) -> Program:
        """The program there. UsageError where the stage is left out, with its reason, or runs no passes."""
        self._run_until(point.stage)
        left_out = next((r.skipped for r in self.records if r.name == point.stage and r.skipped), None)
        if left_out:
            raise UsageError(
                f"there is no graph after {point.stage}: it was left out: {left_out}", where=str(point),
                todo="look at one of: " + ", ".join(r.name for r in self.records if not r.skipped),
            )  # fmt: skip
        if point.step is None:
            return self._programs[point.stage]
        return self._after_pass(point)

    def last(self) -> Point:
        """The last stage that ran, up to optimize: what is shown where no point is asked for."""
        self._run_until("optimize")
        return Point([r.name for r in self.records if not r.skipped][-1])

    def note(self, point: Point) -> str:
        """What to know of a point whose stage or pass did not change the graph, or ''."""
        if point.stage == "qat":
            return "qat keeps the graph; the weights that it learned are put in by quantize"
        record = next((r for r in self.passes(point.stage) if r["name"] == point.step), None)
        if record is None or record["status"] == "applied":
            return ""
        why = {"off": "is switched off", "nothing": "found nothing to change", "dropped": "was dropped"}
        reason = f": {record['reason']}" if record["status"] == "dropped" else ""
        return (
            f"the pass {point.step} {why.get(record['status'], record['status'])}{reason}; the graph is the one before"
        )

    def passes(self, stage: str) -> list[dict[str, Any]]:
        """The records of the stage's passes, as data."""
        return next((r.details.get("passes", []) for r in self.records if r.name == stage), [])

    def _run_until(self, stage: str) -> None:
        for step in STAGES[: STAGE_NAMES.index(stage) + 1]:
            if step.name in self._programs or step.branch and step.name != stage:
                continue
            before = self._before(step.name)
            program, record = run_stage(step, before, self.job, self.cache, self._keys[step.name])
            self._programs[step.name] = program
            self.records.append(record)
            self.told(record)

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        return stage_keys(self.job)

    def _after_pass(self, point: Point) -> Program:
        before = self._before(point.stage)
        if not isinstance(before, ExportedGraph):
            kind = "as TorchScript" if isinstance(before, ScriptGraph) else "as ONNX"
            raise UsageError(
                f"there is no graph after {point}: the model was captured {kind}, which has no graph passes",
                where=str(point), todo="look at one of: " + ", ".join(r.name for r in self.records if not r.skipped),
            )  # fmt: skip
        if point.stage not in self._inside:
            seen: dict[str, Program] = {}
            record = next(r for r in self.records if r.name == point.stage)
            followed(point.stage, before, self.job, watch=seen.__setitem__, without=dropped(record))
            self._inside[point.stage] = seen
        seen = self._inside[point.stage]
        found = seen[START]
        if point.step != START:
            for name in self._steps(point.stage):
                found = seen.get(name, found)
                if name == point.step:
                    break
        return found

    def _before(self, stage: str) -> Program | None:
        """What the stage is given: the result of the one before that is no branch."""
        chain = [step.name for step in STAGES[: STAGE_NAMES.index(stage)] if not step.branch]
        return self._programs[chain[-1]] if chain else None

    def _check_stage(self, stage: str, where: str) -> None:
        if stage not in STAGE_NAMES:
            raise _unknown(f"there is no stage '{stage}'", stage, STAGE_NAMES, where)
        if stage not in _GRAPHS:
            raise UsageError(
                f"the stage {stage} runs no passes", where=where, todo="passes run in " + " and ".join(_GRAPHS)
            )

    def _step(self, step: str, stages: tuple[str, ...], where: str) -> Point:
        if step == START:
            return Point(stages[0], START)
        names = {stage: self._steps(stage) for stage in stages if stage in _GRAPHS}
        for stage, steps in names.items():
            if step in steps:
                return Point(stage, step)
        known = [*dict.fromkeys([name for steps in names.values() for name in steps]), START]
        what = f"there is no pass '{step}'" + (f" in {stages[0]}" if len(stages) == 1 else " and no stage of that name")
        raise _unknown(what, step, [*known, *(STAGE_NAMES if len(stages) > 1 else ())], where)

    def _steps(self, stage: str) -> list[str]:
        from edgeopt import passes

        return [step.name for step in passes.steps(_GRAPHS[stage], passes.load_rules(self.job.project))]


def _unknown(what: str, name: str, known: Any, where: str) -> UsageError:
    near = did_you_mean(name, list(known))
    return UsageError(
        what + (f", did you mean '{near}'?" if near else ""), where=where, todo="one of: " + ", ".join(known)
    )
