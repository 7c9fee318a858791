"""What every candidate is judged against: the unoptimised model's metrics and its recorded calls.

With `evaluate` the cases are the inputs that it asks for. Without it they are calibration batches with the
unoptimised model's outputs, and the judgement by them is called a proxy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgeopt import digest
from edgeopt.errors import DataError
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.ports.user_code import load_attribute
from edgeopt.program import Program, Signature
from edgeopt.program.predict import predictor
from edgeopt.runtime import evaluation, metrics
from edgeopt.runtime.tensors import PackWriter
from edgeopt.spec.manifest import Feed
from edgeopt.spec.report import Interval

CASES_FILE = "cases/tensors.bin"
_INDEX = "cases.json"


@dataclass(frozen=True)
class Baseline:
    """`metrics` of the unoptimised model (empty without `evaluate`) and `cases`, whose tensors lie below `folder`.

    There are no cases where the project has neither `evaluate` nor `calibration`.
    """

    metrics: dict[str, float]
    cases: tuple[Feed, ...]
    folder: Path | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return (self.folder / CASES_FILE).stat().st_size if self.folder else 0


def baseline(program: Program, job: Job, cache: StageCache, key: str) -> Baseline:
    """The metrics and cases of the captured `program`, whose key is `key`; from the cache where it is known."""
    record = _record_evaluate if job.project.evaluate else _record_calibration if job.project.calibration else None
    if record is None:
        return Baseline({}, ())
    heads = {"heads": {n: head.model_dump(mode="json") for n, head in job.project.outputs.items()}}
    place = digest.of_value(
        {"capture": key, "evaluate": job.project.evaluate, "cases_mb": job.limits.cases_mb, **heads}
    )
    folder = cache.find("baseline", place)
    if folder is None:
        folder = cache.store("baseline", place, lambda part: record(program, job, part))
    index = json.loads((folder / _INDEX).read_bytes())
    cases = tuple(Feed.model_validate(feed) for feed in index["cases"])
    intervals = {name: Interval.model_validate(interval) for name, interval in index["intervals"].items()}
    return Baseline(index["metrics"], cases, folder, intervals)


def user_evaluate(job: Job, signature: Signature) -> evaluation.Evaluate:
    """The project's `evaluate` function, which may call predict with inputs nested as the model takes them."""
    given = load_attribute(job.project.evaluate, job.project.folder, key="evaluate", error=DataError)
    return evaluation.taking_nested(given, signature.input_structure, signature.input_names)


def _record_evaluate(program: Program, job: Job, folder: Path) -> None:
    feeds: list[Feed] = []
    predict = predictor(program)
    with PackWriter(folder / CASES_FILE, CASES_FILE) as pack:

        def record(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            outputs = predict(inputs)
            feeds.append(Feed(inputs={name: pack.add(np.asarray(inputs[name])) for name in inputs}))
            return outputs

        evaluate = user_evaluate(job, program.signature)
        recording = evaluation.record(evaluate, record, most_bytes=0, base=job.project.folder)
    _write_index(folder, feeds, recording.metrics, metrics.intervals(recording.measured, recording.samples))


def _record_calibration(program: Program, job: Job, folder: Path) -> None:
    from edgeopt.program.data import calibration_batches

    feeds: list[Feed] = []
    predict = predictor(program)
    room = job.limits.cases_mb * (1 << 20)
    with PackWriter(folder / CASES_FILE, CASES_FILE) as pack:
        for inputs in calibration_batches(job.project, program.signature):
            room -= sum(array.nbytes for array in inputs.values())
            if room < 0 and feeds:
                break
            outputs = predict(inputs)
            feeds.append(
                Feed(
                    inputs={name: pack.add(array) for name, array in inputs.items()},
                    outputs={name: pack.add(array) for name, array in outputs.items()},
                )
            )
    _write_index(folder, feeds, {}, {})


def _write_index(folder: Path, feeds: list[Feed], given: dict[str, float], intervals: dict[str, Interval]) -> None:
    index = {
        "metrics": given,
        "intervals": {name: interval.model_dump(mode="json") for name, interval in intervals.items()},
        "cases": [feed.model_dump(mode="json") for feed in feeds],
    }
    (folder / _INDEX).write_bytes(digest.canonical_json(index))
