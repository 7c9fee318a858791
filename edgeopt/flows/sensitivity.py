"""Sensitivity: the layers of a model ranked by what int8 costs in each of them, before anything is lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeopt.errors import UsageError
from edgeopt.flows.build import workdir_lock
from edgeopt.pipeline import heads, op_files
from edgeopt.pipeline.cache import StageCache
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.pipeline.points import Points
from edgeopt.pipeline.stages import STAGES, StageRecord

if TYPE_CHECKING:
    from edgeopt.quant.sensitivity import Layer


@dataclass(frozen=True)
class Sensitivity:
    """The layers, the most sensitive first. `metrics` are those of the unoptimised model, empty where not measured."""

    name: str
    profile: str
    scheme: str
    stages: tuple[StageRecord, ...]
    layers: tuple[Layer, ...]
    metrics: dict[str, float]


def sensitivity(
    job: Job, *, metric: bool, use_cache: bool = True, told: Callable[[StageRecord], None] = lambda record: None
) -> Sensitivity:
    """Rank the layers of the optimized program by the noise that each brings when it alone is quantized.

    With `metric` also by what the project's evaluate loses by each. Ranges come from the project's calibration;
    nothing is trained. UsageError where the model or the project has no int8, or no evaluate to measure with.
    """
    from edgeopt.pipeline.baseline import baseline
    from edgeopt.pipeline.ranking import ranking
    from edgeopt.quant.prepare import in_words

    if metric and job.project.evaluate is None:
        raise UsageError(
            "the project has no 'evaluate' to measure a metric with", where="--metric",
            todo="add evaluate: file.py:function to the project, or leave --metric out",
        )  # fmt: skip
    if job.project.calibration is None:
        raise UsageError(
            "the project has no 'calibration', which the ranges of int8 come from", where="--sensitivity",
            todo="add calibration: file.py:function to the project",
        )  # fmt: skip
    op_files.check(job)
    with workdir_lock(job.workdir):
        cache, keys = StageCache(job.workdir / "cache", enabled=use_cache), stage_keys(job)
        points = Points(job, cache, told)
        program = points.program(points.last())
        quantize = next(stage for stage in STAGES if stage.name == "quantize")
        if reason := quantize.declines(program, job):
            raise UsageError(
                f"no layer is quantized: {reason}", where="--sensitivity", todo="choose a profile that allows int8"
            )
        judged_by = None
        if metric:
            captured = heads.on(points.program(points.stage("capture")), job.project)
            judged_by = baseline(captured, job, cache, keys["capture"])
        layers = ranking(program, job, cache, keys["optimize"], judged_by)
    return Sensitivity(
        job.project.name, job.profile.name, in_words(job.profile.quantization), tuple(points.records), layers,
        judged_by.metrics if judged_by else {},
    )  # fmt: skip


def as_data(found: Sensitivity) -> dict[str, Any]:
    """The ranking as JSON data."""
    from edgeopt import digest

    return digest.finite(
        {
            "name": found.name,
            "profile": found.profile,
            "scheme": found.scheme,
            "stages": [dataclasses.asdict(record) for record in found.stages],
            "metrics": found.metrics,
            "layers": [
                {**dataclasses.asdict(layer), "name": layer.name, "pattern": layer.pattern} for layer in found.layers
            ],
        }
    )
