"""What makes integers keep the accuracy without labels: the methods of `quantization.improve`, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from edgeopt.program import ExportedGraph
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import bias_correction, equalize, margins, rounding, samples
from edgeopt.quant.prepare import Prepared
from edgeopt.quant.samples import Batch
from edgeopt.spec.profile import ResolvedQuantization

LEAST_SAMPLES = bias_correction.LEAST_SAMPLES


def before(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    kept: Sequence[Batch],
    *,
    keep_float: tuple[str, ...] = (),
    progress: Progress = SILENT,
) -> tuple[ExportedGraph, dict[str, str]]:
    """The methods that change the float program, before it is prepared; method -> what it did."""
    if "equalize" not in quantization.improve or not kept:
        return program, {}
    margin = margins.chosen(program, quantization, kept, keep_float=keep_float, progress=progress)
    program, did = equalize.equalize(program, kept, margin=margin, progress=progress)
    return program, {"equalize": did if margin == equalize.MARGIN else f"{did}; {margin:g} times below clamps"}


def after(prepared: Prepared, kept: Sequence[Batch], *, progress: Progress = SILENT) -> tuple[dict[str, str], int]:
    """The methods that change the calibrated program, in place; method -> what it did, and how many biases changed."""
    wanted = [name for name in prepared.quantization.improve if name in ("rounding", "biases")]
    if not wanted:
        return {}, 0
    rows = sum(map(samples.count, kept))
    if rows < LEAST_SAMPLES:
        return dict.fromkeys(wanted, f"not done: {rows} samples say too little, it takes {LEAST_SAMPLES}"), 0
    batches = samples.spread(prepared.program, kept)
    if "rounding" in wanted and len(batches) >= 2:  # it sets the biases too
        done = rounding.round_weights(prepared.module, batches, progress=progress)
        return {"rounding": done.in_words(sum(map(samples.count, batches)))}, done.biases
    corrected = bias_correction.correct_biases(prepared.module, batches, progress=progress)
    return {"biases": f"{corrected} layers"}, corrected
