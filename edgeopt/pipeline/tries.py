"""One try of the search for mixed precision: the integer stages run with other settings, written, run and judged.

What a try came to is kept in a file of the work folder after each, so that a search that was killed goes on behind
the last one; what its stages made lies in a cache beside it.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeopt import digest
from edgeopt.errors import DeclinedError, EdgeoptError
from edgeopt.pipeline import heads, lowering, torchrun
from edgeopt.pipeline.baseline import CASES_FILE, Baseline
from edgeopt.pipeline.cache import StageCache, link_or_copy
from edgeopt.pipeline.gates import GateRow, run_gate
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import read_by
from edgeopt.pipeline.ranking import ranking
from edgeopt.pipeline.stages import Stage, integer_stages, run_stage
from edgeopt.program import ExportedGraph, Program, Signature
from edgeopt.runtime.artifact import replace_file
from edgeopt.spec.manifest import Feed

if TYPE_CHECKING:
    from edgeopt.quant.sensitivity import Layer

ROUNDS, CALLS = 3, 20  # of timing; the gate after the search times what it found against the float candidates


@dataclass(frozen=True)
class Setup:
    """What a try does: the weights' granularity, whether QAT's weights and ranges are taken, and what stays float."""

    per_channel: bool
    trained: bool
    keep: tuple[str, ...] = ()  # patterns of single operators, sorted
    names: tuple[str, ...] = field(default=(), compare=False)  # the same layers as people call them

    @property
    def words(self) -> str:
        """The try in a few words: 'per-channel weights, calibrated, 2 layers float'."""
        parts = [f"per-{'channel' if self.per_channel else 'tensor'} weights"]
        parts.append("trained (QAT)" if self.trained else "calibrated (PTQ)")
        if self.keep:
            parts.append(f"{len(self.keep)} layer{'s' if len(self.keep) > 1 else ''} float")
        return ", ".join(parts)


@dataclass(frozen=True)
class Try:
    """What a try came to. `reason` says why it did not pass; `p50_ms` is None where this machine is not the target."""

    what: str
    passed: bool
    reason: str = ""
    margin: float | None = None  # of the check that is nearest to its limit or farthest below it, a part of the limit
    layers_float: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    sqnr_db: float | None = None
    p50_ms: float | None = None
    seconds: float = 0.0
    resumed: bool = False  # it was made by an earlier build that did not end


@dataclass(frozen=True)
class Ground:
    """What all tries start from: programs with their keys. Tensors of reference and cases lie in `staging`.

    `trained` is the optimized program with QAT's state, None where QAT did not run; it took `training_s`.
    """

    job: Job
    optimized: ExportedGraph
    key: str
    trained: ExportedGraph | None
    trained_key: str
    training_s: float
    signature: Signature
    reference: tuple[Feed, ...]
    baseline: Baseline
    staging: Path


class Tries:
    """The tries of one build, checkpointed below `folder` under `key`. `told` hears of each, also of resumed ones."""

    def __init__(self, ground: Ground, folder: Path, key: str, told: Callable[[Try], None]):
        self._ground, self._told = ground, told
        self._cache = StageCache(folder / "cache")
        self._file = folder / f"{key}.json"
        self._kept: dict[str, dict[str, Any]] = self._read()
        self._now: dict[str, Try] = {}
        self._setups: dict[str, Setup] = {}
        self.done: list[Try] = []
        self.longest_s = 0.0  # of the tries that this process made

    def note(self, made: Try) -> Try:
        """Record what needed no run: a step that cannot be taken, or a candidate that was judged before."""
        self.done.append(made)
        self._told(made)
        return made

    def run(self, setup: Setup) -> Try:
        """The try's result, made now or by an earlier build. What cannot be built is a try that did not pass."""
        key = _key(setup)
        self._setups[key] = setup
        if key in self._now:
            return self._now[key]
        if key in self._kept:
            made = self._kept[key] | {"layers_float": tuple(self._kept[key]["layers_float"]), "resumed": True}
            self._now[key] = Try(**made)
            return self.note(self._now[key])
        started = time.monotonic()
        try:
            row = self._judged(setup)
            made = _try_of(setup, row)
        except EdgeoptError as why:
            made = Try(setup.words, False, why.what, layers_float=setup.names)
        seconds = time.monotonic() - started
        self.longest_s = max(self.longest_s, seconds)
        made = dataclasses.replace(made, seconds=round(seconds, 3))
        self._keep(key, dataclasses.asdict(made))
        self._now[key] = made
        return self.note(made)

    def best(self) -> Setup | None:
        """The setup that passed with the fewest layers float, so far; of equals the first."""
        passed = [self._setups[key] for key, made in self._now.items() if made.passed]
        return min(passed, key=lambda setup: len(setup.keep), default=None)

    def kept_gains(self, setup: Setup, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What `measure` gave for the setup the first time: times measured anew would lead the search elsewhere."""
        key = f"gains {_key(setup)}"
        if key not in self._kept:
            self._keep(key, measure())
        return self._kept[key]

    def _keep(self, key: str, value: dict[str, Any]) -> None:
        self._kept[key] = digest.finite(value)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, json.dumps(self._kept, allow_nan=False).encode())

    def program(self, setup: Setup) -> tuple[ExportedGraph, str]:
        """The integer program of a setup and its key, from the tries' cache where it is there."""
        job = self.job(setup)
        stages = integer_stages(setup.keep)
        program, key = self.base(setup)
        for name in ("quantize", "reoptimize"):
            kept_float = [*setup.keep, *job.project.keep_float, *job.project.keep_fp32]
            key = digest.of_value({"stage": name, "before": key, "keep": kept_float, **read_by(name, job)})
            program, record = run_stage(stages[name], program, job, self._cache, key)
            if record.skipped:
                raise EdgeoptError(record.skipped)
        return program, key

    def base(self, setup: Setup) -> tuple[ExportedGraph, str]:
        """The program that is quantized, and its key: the optimized one, with QAT's state where the setup takes it."""
        ground, job = self._ground, self.job(setup)
        if not setup.trained:
            return ground.optimized, ground.key
        if ground.trained is not None and job.profile == ground.job.profile:
            return ground.trained, ground.trained_key
        key = digest.of_value({"stage": "qat", "before": ground.key, **read_by("qat", job)})
        program, record = run_stage(training(job), ground.optimized, job, self._cache, key)
        if record.skipped:
            raise EdgeoptError(record.skipped)
        return program, key

    def layers(self, setup: Setup) -> tuple[Layer, ...]:
        """The layers of the setup's program, the most sensitive first."""
        program, key = self.base(setup)
        return ranking(program, self.job(setup), self._cache, key)

    def expected_s(self, setup: Setup) -> float:
        """Seconds that the try may take: what the longest took, and the training that it has to do first."""
        trains = setup.trained and self.job(setup).profile != self._ground.job.profile and not setup.keep
        return self.longest_s + (self._ground.training_s if trains else 0.0)

    def is_known(self, setup: Setup) -> bool:
        """Whether an earlier build made the try."""
        return _key(setup) in self._kept

    def job(self, setup: Setup) -> Job:
        profile = self._ground.job.profile
        quantization = profile.quantization.model_copy(update={"per_channel": setup.per_channel})
        return dataclasses.replace(self._ground.job, profile=profile.model_copy(update={"quantization": quantization}))

    def _judged(self, setup: Setup) -> GateRow:
        ground, job = self._ground, self.job(setup)
        program, key = self.program(setup)
        with tempfile.TemporaryDirectory(prefix=".try-", dir=ground.staging) as scratch:
            folder = Path(scratch)
            for name in {ref.file for feed in ground.reference for ref in feed.inputs.values()} | {CASES_FILE}:
                if (ground.staging / name).exists():
                    link_or_copy(ground.staging / name, folder / name)
            program = heads.on(program, job.project)
            lowered = lowering.lower(program, job, self._cache, key, folder)
            candidates = tuple(c for c in lowered.candidates if c.precision == "int8")
            if not candidates:
                raise EdgeoptError("; ".join(r.reason for r in lowered.refused) or "no backend takes it")
            rows = run_gate(
                folder, candidates, ground.signature, ground.reference, ground.baseline, job,
                rounds=ROUNDS, calls=CALLS, programs={c.name: program for c in candidates}, warn=False,
            )  # fmt: skip
        return next((row for row in rows if row.kept), rows[0])

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            kept = json.loads(self._file.read_bytes())
            return kept if isinstance(kept, dict) else {}
        except (OSError, ValueError):
            return {}


def training(job: Job) -> Stage:
    """QAT as a try makes it: alone, since the processes that torchrun started beside this one train once and leave."""
    stage, own = integer_stages(())["qat"], job.project.qat
    if torchrun.place() is None or own.trainer or own.state:
        return stage

    def declined(program: Program | None, job: Job) -> Any:
        raise DeclinedError(
            "it takes a training of its own, and the processes of torchrun train once a build: build again in one "
            "process to try it"
        )

    return dataclasses.replace(stage, run=declined)


def margin(row: GateRow) -> float | None:
    """How far the row's worst check is above its limit, as a part of the limit; negative where it is below."""
    judged = [check for check in row.checks if check.value is not None and check.limit is not None]
    return min(((c.value - c.limit) / max(abs(c.limit), 1e-9) for c in judged), default=None)


def _key(setup: Setup) -> str:
    return digest.of_value({"channel": setup.per_channel, "trained": setup.trained, "keep": setup.keep})


def _try_of(setup: Setup, row: GateRow) -> Try:
    result = row.result
    return Try(
        what=setup.words,
        passed=row.kept,
        reason="" if row.kept else row.reason,
        margin=margin(row),
        layers_float=setup.names,
        metrics=result.metrics,
        sqnr_db=result.sqnr_db,
        p50_ms=result.p50_ms if row.stand_in is None else None,
    )
