"""reoptimize, held to what the runtime really runs: a pass that costs onnxruntime an integer kernel is dropped.

The passes keep every value; whether onnxruntime's optimizer still finds its Q/DQ groups afterwards is known only by
asking it. So where it is a backend and its target is this machine, the graph before and after is lowered and its own
optimized graph read; where there are fewer integer kernels, each pass that changed something is left out in turn.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeopt.errors import EdgeoptError
from edgeopt.pipeline.gates import target_is_here
from edgeopt.pipeline.job import Job
from edgeopt.program import ExportedGraph
from edgeopt.progress import log

Reoptimize = Callable[[Mapping[str, Any]], tuple[ExportedGraph, list[Any]]]
_NAMED_BOUNDARIES = 10
_LAYERS = ("conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm", "bmm")


def reoptimize(program: ExportedGraph, job: Job, run: Reoptimize) -> tuple[ExportedGraph, list[Any], dict[str, Any]]:
    """The integer program cleaned, the records of its passes, and details: kernels before and after, warnings.

    `run(passes)` runs the table with these settings of passes.
    """
    result, records = run(job.passes)
    if "onnxruntime" not in job.profile.backends or not target_is_here(job.profile):
        return result, records, {}
    try:
        before = _kernels(program, job)
        changed = any(record.status == "applied" for record in records)
        after = _kernels(result, job) if changed else before
        if _count(after) < _count(before):
            result, records, after = _without_the_culprit(program, job, run, records, before, after)
    except EdgeoptError as why:  # what cannot be lowered is refused when it is; that is said there, not here
        log.debug("reoptimize: kernels not counted: %s", why.what)
        return result, records, {}
    warnings = [*_still_float(result, after), *_boundaries(after)]
    details = {"kernels": {"before": _as_data(before), "after": _as_data(after)}}
    return result, records, {**details, "warnings": warnings} if warnings else details


def _without_the_culprit(program, job: Job, run: Reoptimize, records, before, worse) -> tuple[Any, Any, Any]:
    """The result without the first pass whose absence gives the kernels back, else without all that changed it."""
    applied = [r.name for r in records if r.status == "applied"]
    for off in (*([name] for name in applied), applied):
        result, retried = run({**job.passes, **dict.fromkeys(off, False)})
        after = _kernels(result, job)
        if _count(after) >= _count(before):
            break
    else:
        result, retried, after = program, records, before
    lost = f"onnxruntime runs {_count(worse)} operators on integers with it, and {_count(after)} without"
    log.warning("the graph pass %s was dropped: %s", ", ".join(off), lost)
    retried = [dataclasses.replace(r, status="dropped", reason=lost) if r.name in off else r for r in retried]
    return result, retried, after


def _kernels(program: ExportedGraph, job: Job):
    from edgeopt.backends import integer_kernels, onnx_export

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        onnx_export.write_unproved(program, path, opset_max=job.profile.target.onnx_opset_max)
        return integer_kernels.kernels(path, program.custom_ops)


def _count(kernels) -> int:
    return kernels.integer_count


def _as_data(kernels) -> dict[str, Any]:
    return {"integer": kernels.integer, "floats": kernels.floats, "quantizes": kernels.quantizes}


def _still_float(program: ExportedGraph, kernels) -> list[str]:
    """What the quantizer made integers for, and the runtime multiplies in float all the same."""
    wanted = sum(_has_integer_weight(node) for node in program.module.graph.nodes)
    lost = min(wanted - kernels.integer_products, kernels.float_products)
    if lost <= 0:
        return []
    return [f"onnxruntime runs {lost} of {wanted} layers with integer weights in float"]


def _has_integer_weight(node) -> bool:
    from edgeopt.program.patterns import aten_name
    from edgeopt.program.qdq import is_dequantize

    return aten_name(node) in _LAYERS and len(node.args) > 1 and is_dequantize(node.args[1])


def _boundaries(kernels) -> list[str]:
    """The boundaries that cost: float operators between two integer ones."""
    named = [f"float between integers: {boundary}" for boundary in kernels.boundaries]
    more = len(named) - _NAMED_BOUNDARIES
    return [*named[:_NAMED_BOUNDARIES], *([f"float between integers: {more} more places"] if more > 0 else [])]
