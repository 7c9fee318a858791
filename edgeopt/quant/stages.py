"""The two stages of the pipeline that this room answers for, from project and profile."""

from __future__ import annotations

from typing import Any

import torch

from edgeopt.program import ExportedGraph, data
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import convert, finetune, gradients
from edgeopt.quant.prepare import prepare
from edgeopt.quant.report import QuantReport
from edgeopt.spec.profile import Profile
from edgeopt.spec.project import Project


def quantize(
    program: ExportedGraph, project: Project, profile: Profile, *, progress: Progress = SILENT
) -> tuple[ExportedGraph, QuantReport]:
    """The integer program: from `program.qat_state` where QAT ran, else from the project's calibration data.

    DataError for calibration data that cannot be used, ProjectError for a `keep_float` that names nothing.
    """
    keep = _keep_float(project, profile)
    if program.qat_state is not None:
        return convert.from_state(program, profile.quantization, program.qat_state, keep_float=keep)
    return convert.from_batches(
        program,
        profile.quantization,
        data.calibration_batches(project, program.signature),
        limit=project.calibration_batches,
        keep_float=keep,
        progress=progress,
    )


def qat(
    program: ExportedGraph, project: Project, profile: Profile, *, progress: Progress = SILENT
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Quantization-aware fine-tuning with the project's `train` and `loss`.

    Returns the fake-quantized program's state_dict (CPU tensors), which `quantize` replays, and details for the
    record. DataError for training data that cannot be used, StageError for a loss that is NaN or infinite and for an
    operator of the user's own without a gradient.
    """
    gradients.require(program)
    prepared = prepare(program, profile.quantization, qat=True, keep_float=_keep_float(project, profile))
    training = finetune.train(
        prepared,
        lambda: data.Rows(data.call(project, "train"), project, "train"),
        data.guarded(project, "loss"),
        project.qat,
        seed=project.seed,
        progress=progress,
    )
    return training.state, training.details


def _keep_float(project: Project, profile: Profile) -> tuple[str, ...]:
    return (*project.keep_float, *project.keep_fp32, *profile.precision.keep_fp32)
