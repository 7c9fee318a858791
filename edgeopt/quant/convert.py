"""From a float program to an integer one: calibrated or trained ranges become Q/DQ, weights become integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from edgeopt.program import ExportedGraph
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import findings, pt2e
from edgeopt.quant.bias_correction import correct_biases
from edgeopt.quant.calibrate import calibrate
from edgeopt.quant.prepare import Prepared, prepare
from edgeopt.quant.report import QuantReport
from edgeopt.spec.profile import ResolvedQuantization


def from_batches(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    batches: Iterable[Any],
    *,
    limit: int = 32,
    keep_float: tuple[str, ...] = (),
    progress: Progress = SILENT,
) -> tuple[ExportedGraph, QuantReport]:
    """Post-training quantization on at most `limit` batches {input name: array}; the first ones also correct biases."""
    prepared = prepare(program, quantization, keep_float=keep_float)
    first = calibrate(prepared, batches, limit=limit, progress=progress)
    corrected = 0
    if quantization.ranges != "percentile":  # measured: with clipped ranges a corrected bias agrees less (docs/numbers)
        corrected = correct_biases(prepared.module, first, progress=progress)
    integer, report = convert(prepared)
    return integer, dataclasses.replace(report, biases_corrected=corrected)


def from_state(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    state: dict[str, torch.Tensor],
    *,
    keep_float: tuple[str, ...] = (),
) -> tuple[ExportedGraph, QuantReport]:
    """The integer program of a fine-tuned one: the preparation is repeated and `state`, which `qat` gave, loaded."""
    prepared = prepare(program, quantization, qat=True, keep_float=keep_float)
    prepared.module.load_state_dict(state)
    return convert(prepared)


def convert(prepared: Prepared) -> tuple[ExportedGraph, QuantReport]:
    """The integer program of a calibrated or trained one, which is used up by it; weights are stored as int8."""
    findings.fit_biases(prepared.module)
    warnings = findings.range_warnings(prepared.module)
    with torch.random.fork_rng(devices=()):  # torchao traces its patterns with random inputs
        module = pt2e.convert_pt2e(prepared.module, use_reference_representation=False, fold_quantize=True)
    program = prepared.program.after("quantize", module=module, integer=True)
    return program, dataclasses.replace(prepared.report, warnings=warnings)
