"""onnxruntime: `float.onnx`, `float16.onnx` or `int8.onnx`, and the session's options as flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from edgeopt.backends import custom_ops, dynamic_lstm, integer_kernels, onnx_export
from edgeopt.backends.backend import Lowered, precision_of, refusal
from edgeopt.errors import LoweringError
from edgeopt.program import ExportedGraph, Program
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_checks import refusal as cannot

runtime = "onnxruntime"


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """A precision that onnxruntime's kernels on the target do not have."""
    reason = cannot(precision_of(program), runtime, profile.target)
    return (reason,) if reason else ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'onnxruntime-fp32', 'onnxruntime-fp16' or 'onnxruntime-int8', and one more for LSTMs."""
    precision = precision_of(program)
    name = f"{runtime}-{precision}"
    reasons = refusals(program, profile)
    if reasons:
        return refusal(name, "; ".join(reasons))
    try:
        file = onnx_export.write(program, out, opset_max=profile.target.onnx_opset_max)
    except LoweringError as why:
        return refusal(name, why)
    nodes = custom_ops.nodes_in(out / file.name)
    if reason := custom_ops.missing_in_onnxruntime(nodes, program.custom_ops, profile.target.arch):
        return refusal(name, reason)
    candidate = Candidate(
        name=name,
        runtime=runtime,
        precision=precision,
        file=file.name,
        flags=_options(profile, precision),
        opset=file.opset,
    )
    lowered = Lowered(files=file.files, candidates=(candidate,))
    if precision != "int8":
        return lowered
    if reason := _stays_float(out / file.name, program):
        lowered = refusal(name, reason)
    return _with_dynamic_lstm(lowered, candidate, program, profile, out)


def _with_dynamic_lstm(
    lowered: Lowered, candidate: Candidate, program: Program, profile: Profile, out: Path
) -> Lowered:
    """And the candidate 'onnxruntime-int8-dynamic' where the file has LSTMs, of which the other one has none."""
    quantization = profile.quantization
    if not quantization.dynamic or not dynamic_lstm.lstms(out / candidate.file):
        return lowered
    name = f"{candidate.name}-dynamic"
    try:
        made = dynamic_lstm.write(
            program, out / candidate.file, per_channel=quantization.per_channel, weight_bits=quantization.weight_bits
        )
    except LoweringError as why:
        return dataclasses.replace(lowered, refused=(*lowered.refused, *refusal(name, why).refused))
    more = candidate.model_copy(update={"name": name, "file": made.name})
    return dataclasses.replace(lowered, files=(*lowered.files, made.name), candidates=(*lowered.candidates, more))


def _stays_float(file: Path, program: Program) -> str | None:
    """Why the file is no int8 candidate: onnxruntime fuses none of its products into an integer kernel; else None.

    Of a model that came quantized there is no other form, so it is taken as it is.
    """
    if not isinstance(program, ExportedGraph):
        return None
    found = integer_kernels.kernels(file, program.custom_ops)
    if found.integer_products:
        return None
    floats = ", ".join(f"{count} {op}" for op, count in found.floats.items())
    return f"onnxruntime runs no convolution or matrix product of it on integers, but in float: {floats or 'nothing'}"


def _options(profile: Profile, precision: str) -> dict[str, Any]:
    """The keys that the runner sets on a session. Threads are left to the runner, which knows the device.

    On a Jetson the GPU is the backend tensorrt's, and onnxruntime serves the CPU.
    """
    on_gpu = profile.target.kind == "desktop"
    return {
        "intra_op_threads": None,
        "graph_optimization": "all",
        **({"disabled_optimizers": list(integer_kernels.DISABLED_FOR_INT8)} if precision == "int8" else {}),
        "providers": [*(["CUDAExecutionProvider"] if on_gpu else []), "CPUExecutionProvider"],
    }
