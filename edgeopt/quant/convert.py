"""From a float program to an integer one: calibrated or trained ranges become Q/DQ, weights become integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from edgeopt.program import ExportedGraph, graph
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import batch_norms, findings, improve, integers, off_centre, pt2e, samples
from edgeopt.quant import state as state_dict
from edgeopt.quant.calibrate import calibrate
from edgeopt.quant.prepare import Prepared, prepare
from edgeopt.quant.report import QuantReport
from edgeopt.quant.sharing import share_near_scales
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
    """Post-training quantization on at most `limit` batches {input name: array}, with what `improve` names."""
    ready = calibrated(program, quantization, batches, limit=limit, keep_float=keep_float, progress=progress)
    after, biases = improve.after(ready.prepared, ready.kept, progress=progress)
    integer, report = convert(ready.prepared)
    return integer, dataclasses.replace(report, improved={**ready.improved, **after}, biases_corrected=biases)


@dataclass(frozen=True)
class Calibrated:
    """A program with its ranges. `kept`: batches for what `improve` does after it, `first`: a few, positional all."""

    prepared: Prepared
    kept: list[samples.Batch]
    first: list[samples.Batch]
    improved: dict[str, str]


def calibrated(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    batches: Iterable[Any],
    *,
    limit: int,
    keep_float: tuple[str, ...] = (),
    progress: Progress = SILENT,
) -> Calibrated:
    """The program as its weights are rounded: equalized where asked for, and without layers that no range serves."""
    kept, stream = [], batches
    if quantization.improve:  # nothing else looks at a batch twice
        kept, stream = samples.held(batches, program.signature, limit=limit)
    program, did = improve.before(program, quantization, kept, keep_float=keep_float, progress=progress)
    prepared = prepare(program, quantization, keep_float=keep_float)
    first = calibrate(prepared, stream, limit=limit, progress=progress)
    return Calibrated(off_centre.kept_float(prepared), kept, first, did)


def from_state(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    state: dict[str, torch.Tensor],
    *,
    keep_float: tuple[str, ...] = (),
) -> tuple[ExportedGraph, QuantReport]:
    """The integer program of a fine-tuned one: the preparation is repeated and `state`, which `qat` gave, loaded."""
    prepared = prepare(program, quantization, qat=True, keep_float=keep_float)
    state_dict.load(prepared.module, state)
    return convert(prepared)


def convert(prepared: Prepared) -> tuple[ExportedGraph, QuantReport]:
    """The integer program of a calibrated or trained one, which is used up by it; weights are stored as int8."""
    findings.fit_biases(prepared.module)
    inputs = prepared.program.signature.input_names
    warnings = (*prepared.report.warnings, *findings.range_warnings(prepared.module, inputs))
    batch_norms.hide(prepared.module)
    with torch.random.fork_rng(devices=()):  # torchao traces its patterns with random inputs
        module = pt2e.convert_pt2e(prepared.module, use_reference_representation=False, fold_quantize=False)
    batch_norms.show(module)
    integers.store_weights(module)
    graph.remove_unused(module)
    if not prepared.qat:  # the loss of a training has seen each operand with its own scale
        share_near_scales(module)
    integers.complete_metadata(module)
    program = prepared.program.after("quantize", module=module, integer=True)
    return program, dataclasses.replace(prepared.report, warnings=warnings)
