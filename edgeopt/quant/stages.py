"""The two stages of the pipeline that this room answers for, from project and profile."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from edgeopt.errors import DataError, StageError
from edgeopt.ports import user_code
from edgeopt.program import ExportedGraph, OnnxGraph, data
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import convert, finetune, gradients, onnx_ptq, recurrent
from edgeopt.quant.partial import partial_state
from edgeopt.quant.prepare import Prepared, prepare
from edgeopt.quant.report import QuantReport
from edgeopt.quant.training import hooks, randomness, ranges
from edgeopt.quant.training.batches import Loader, takes_rank
from edgeopt.quant.training.checkpoints import Checkpoints
from edgeopt.quant.training.optimizers import MakeOptimizer
from edgeopt.quant.training.ranks import ALONE, Ranks
from edgeopt.quant.training.score import scorer
from edgeopt.spec.profile import Profile
from edgeopt.spec.project import Project


def quantize(
    program: ExportedGraph | OnnxGraph,
    project: Project,
    profile: Profile,
    *,
    keep_float: tuple[str, ...] = (),
    progress: Progress = SILENT,
) -> tuple[ExportedGraph | OnnxGraph, QuantReport]:
    """The integer program: from `program.qat_state` where QAT ran, else from the project's calibration data.

    `keep_float`: more layers to leave float than project and profile say, as the search for mixed precision asks.
    DataError for calibration data that cannot be used, ProjectError for a `keep_float` that names nothing.
    """
    result, report = _quantized(program, project, profile, keep_float, progress)
    dynamic = profile.quantization.dynamic and "onnxruntime" in profile.backends
    return result, recurrent.reported(report, program, dynamic=dynamic)


def _quantized(
    program: ExportedGraph | OnnxGraph, project: Project, profile: Profile, more: tuple[str, ...], progress: Progress
) -> tuple[ExportedGraph | OnnxGraph, QuantReport]:
    own = _keep_float(project, profile)
    keep = (*own, *more)
    if isinstance(program, ExportedGraph) and program.qat_state is not None:
        state = program.qat_state
        if more:
            state = partial_state(program, profile.quantization, trained_with=own, keep_float=keep)
        return convert.from_state(program, profile.quantization, state, keep_float=keep)
    by_batches = onnx_ptq.quantize if isinstance(program, OnnxGraph) else convert.from_batches
    return by_batches(
        program,
        profile.quantization,
        data.calibration_batches(project, program.signature),
        limit=project.calibration_batches,
        keep_float=keep,
        progress=progress,
    )


def qat(
    program: ExportedGraph,
    project: Project,
    profile: Profile,
    *,
    kept: Checkpoints | None = None,
    ranks: Ranks = ALONE,
    progress: Progress = SILENT,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Quantization-aware fine-tuning with the project's `train` and `loss`, or with its own trainer.

    Returns the fake-quantized program's state_dict (CPU tensors), which `quantize` replays, and details for the
    record. DataError for training data that cannot be used, StageError for a loss or gradient that is not finite and
    for an operator of the user's own without a gradient.
    """
    gradients.require(program)
    prepared = prepare(program, profile.quantization, qat=True, keep_float=_keep_float(project, profile))
    lost = gradients.lost(program.module, project.folder)
    if project.qat.state:
        return hooks.from_file(prepared, project.path(project.qat.state)), {"taken_from": project.qat.state}
    if project.qat.trainer:
        return _by_own_trainer(prepared, project, lost)
    how = {
        "seed": project.seed,
        "make_optimizer": _optimizer(project),
        "ranks": ranks,
        "progress": progress,
        "score": scorer(project, program.signature) if project.evaluate else None,
    }
    data_and_loss = training_loader(project), data.guarded(project, "loss")
    training = finetune.train(prepared, *data_and_loss, project.qat, kept=kept and kept.named("qat"), **how)
    details = {**training.details, "warnings": [*training.details["warnings"], *lost]}
    if project.qat.control:
        with ranks.failing_together():
            if project.evaluate and ranks.first:
                details["metrics_after"] = how["score"](prepared.module)
        plain = kept and kept.named("control")
        details["control"] = finetune.control(prepared, *data_and_loss, project.qat, kept=plain, **how)
    return training.state, details


def prepared_model(program: ExportedGraph, project: Project, profile: Profile) -> hooks.FakeQuantized:
    """The fake-quantized model for a trainer that is not edgeopt's."""
    gradients.require(program)
    return hooks.FakeQuantized(
        prepare(program, profile.quantization, qat=True, keep_float=_keep_float(project, profile))
    )


def training_loader(project: Project) -> Loader:
    """The project's `train`, guarded; it keeps its parameters `rank` and `world_size` where it has them."""
    function = user_code.load_attribute(project.train, project.folder, key="train", error=DataError)

    def call(**where: int) -> data.Rows:
        batches = user_code.call(partial(function, **where), key="train", base=project.folder, error=DataError)
        return data.Rows(batches, project, "train")

    if takes_rank(function):
        return lambda rank, world_size: call(rank=rank, world_size=world_size)
    return lambda: call()


def _by_own_trainer(
    prepared: Prepared, project: Project, lost: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    trainer = user_code.load_attribute(project.qat.trainer, project.folder, key="qat.trainer", error=StageError)
    model, started = hooks.FakeQuantized(prepared), time.perf_counter()
    with randomness.reproducible(project.seed):
        user_code.call(trainer, model, key="qat.trainer", base=project.folder, error=StageError)
    seconds = round(time.perf_counter() - started, 3)
    warnings = [*ranges.mixed(prepared.module), *lost]
    return hooks.finish(model), {"trainer": project.qat.trainer, "seconds": seconds, "warnings": warnings}


def _optimizer(project: Project) -> MakeOptimizer | None:
    name = project.qat.optimizer
    if ":" not in name:
        return None
    function = user_code.load_attribute(name, project.folder, key="qat.optimizer", error=StageError)
    return lambda parameters: user_code.call(
        function, parameters, key="qat.optimizer", base=project.folder, error=StageError
    )


def _keep_float(project: Project, profile: Profile) -> tuple[str, ...]:
    return (*project.keep_float, *project.keep_fp32, *profile.precision.keep_fp32)
