"""onnxruntime: `float.onnx`, `float16.onnx` or `int8.onnx`, and the session's options as flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeopt.backends import custom_ops, onnx_export
from edgeopt.backends.backend import Lowered, precision_of, refusal
from edgeopt.errors import LoweringError
from edgeopt.program import Program
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_checks import refusal as cannot

runtime = "onnxruntime"


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """A precision that onnxruntime's kernels on the target do not have."""
    reason = cannot(precision_of(program), runtime, profile.target)
    return (reason,) if reason else ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'onnxruntime-fp32', 'onnxruntime-fp16' or 'onnxruntime-int8'."""
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
        name=name, runtime=runtime, precision=precision, file=file.name, flags=_options(profile), opset=file.opset
    )
    return Lowered(files=file.files, candidates=(candidate,))


def _options(profile: Profile) -> dict[str, Any]:
    """The keys that the runner sets on a session. Threads are left to the runner, which knows the device.

    On a Jetson the GPU is the backend tensorrt's, and onnxruntime serves the CPU.
    """
    on_gpu = profile.target.kind == "desktop"
    return {
        "intra_op_threads": None,
        "graph_optimization": "all",
        "providers": [*(["CUDAExecutionProvider"] if on_gpu else []), "CPUExecutionProvider"],
    }
