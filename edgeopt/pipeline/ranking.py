"""The layers of a program ranked by what int8 costs in each: by noise, and by the project's own metric.

Cached like a stage's result, under the key of what was measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgeopt import digest
from edgeopt.device.measured import Lazy
from edgeopt.pipeline.baseline import Baseline, user_evaluate
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.program import ExportedGraph, graph
from edgeopt.runtime import evaluation, tensors
from edgeopt.spec.manifest import Feed

if TYPE_CHECKING:
    from edgeopt.quant.sensitivity import Alone, Layer

_INDEX = "layers.json"
_MOST_BYTES = 256 << 20  # of answers that are kept for evaluate at a time


def ranking(
    program: ExportedGraph, job: Job, cache: StageCache, key: str, baseline: Baseline | None = None
) -> tuple[Layer, ...]:
    """The program's quantizable layers, the most sensitive first; `key` is the program's.

    With `baseline`, whose cases are what the project's evaluate asks for, the metrics that each layer alone loses are
    measured as well, and decide the order. Ranges come from calibration, or from QAT where the program has its state.
    """
    from edgeopt.quant.sensitivity import Layer

    place = digest.of_value(
        {
            "program": key,
            "quantization": job.profile.quantization.model_dump(mode="json"),
            "keep": _keep_float(job),
            "calibration_batches": job.project.calibration_batches,
            "evaluate": job.project.evaluate if baseline else None,
        }
    )
    found = cache.find("sensitivity", place)
    if found is None:
        found = cache.store("sensitivity", place, lambda folder: _measure_into(program, job, baseline, folder))
    return tuple(Layer(**row) for row in json.loads((found / _INDEX).read_bytes()))


def _measure_into(program: ExportedGraph, job: Job, baseline: Baseline | None, folder: Path) -> None:
    from edgeopt.quant import sensitivity

    prepared, batches = sensitivity.calibrated(
        program, job.profile.quantization, job.project, keep_float=_keep_float(job), progress=job.progress
    )
    layers = sensitivity.measure(prepared, batches, progress=job.progress)
    if baseline is not None:
        layers = sensitivity.with_metrics(layers, _lost(sensitivity.Alone(prepared), program, job, baseline))
    rows = [digest.finite(dataclasses.asdict(layer)) for layer in layers]
    (folder / _INDEX).write_bytes(digest.canonical_json(rows))


def _keep_float(job: Job) -> tuple[str, ...]:
    return (*job.project.keep_float, *job.project.keep_fp32, *job.profile.precision.keep_fp32)


def _lost(alone: Alone, program: ExportedGraph, job: Job, baseline: Baseline) -> dict[str, dict[str, float]]:
    """Node -> metric -> what it falls by when the layer alone is quantized, in the program as torch runs it."""
    from edgeopt.program import heads

    evaluate = user_evaluate(job, program.signature)
    inputs = Lazy(baseline.cases, lambda i: _read(baseline.cases[i], baseline.folder))

    def metrics(outputs: list[dict]) -> dict[str, float]:
        given = [heads.answers(answer, job.project.outputs) for answer in outputs]
        return evaluation.replay(evaluate, inputs, given, base=job.project.folder)

    names = [decision.node for decision in alone.layers]
    exact = [graph.to_arrays(program.signature, alone.exact(_tensors(program, i))) for i in inputs]
    wanted = metrics(exact)
    size = sum(array.nbytes for outputs in exact for array in outputs.values())
    lost: dict[str, dict[str, float]] = {}
    with job.progress.bar("measuring metrics of layers", len(names) * len(inputs)) as advance:
        for group in _groups(names, max(1, _MOST_BYTES // max(1, size))):
            answers: dict[str, list[dict]] = {name: [] for name in group}
            for given in inputs:
                for decision, outputs in alone.quantized(_tensors(program, given), only=frozenset(group)):
                    answers[decision.node].append(graph.to_arrays(program.signature, outputs))
                    advance(1)
            for name in group:
                found = metrics(answers[name])
                lost[name] = {metric: value - found[metric] for metric, value in wanted.items()}
    return lost


def _tensors(program: ExportedGraph, inputs: dict) -> list:
    return graph.to_tensors(program.signature, inputs)


def _groups(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))


def _read(feed: Feed, folder: Path) -> dict:
    return {name: tensors.read(folder, ref) for name, ref in feed.inputs.items()}
