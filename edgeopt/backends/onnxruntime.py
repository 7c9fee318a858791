"""onnxruntime on the CPU: `float.onnx` or `int8.onnx`, and the session's options as flags."""

from __future__ import annotations

from pathlib import Path

from edgeopt.backends import onnx_export
from edgeopt.backends.backend import Lowered, is_integer, refusal
from edgeopt.errors import LoweringError
from edgeopt.program import Program, ScriptGraph
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import Profile

runtime = "onnxruntime"

# The keys that the runner's adaptor sets on a session; threads are left to the runner, which knows the device.
SESSION_OPTIONS = {
    "intra_op_threads": None,
    "graph_optimization": "all",
    "providers": ["CPUExecutionProvider"],
}


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """A program that exists only as TorchScript has no ONNX form."""
    if isinstance(program, ScriptGraph):
        return ("the model could only be captured as TorchScript, which has no ONNX form",)
    return ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'onnxruntime-fp32' or 'onnxruntime-int8'."""
    precision = "int8" if is_integer(program) else "fp32"
    name = f"{runtime}-{precision}"
    reasons = refusals(program, profile)
    if reasons:
        return refusal(name, "; ".join(reasons))
    try:
        file = onnx_export.write(program, out, opset_max=profile.target.onnx_opset_max)
    except LoweringError as why:
        return refusal(name, why)
    candidate = Candidate(
        name=name, runtime=runtime, precision=precision, file=file.name, flags=SESSION_OPTIONS, opset=file.opset
    )
    return Lowered(files=file.files, candidates=(candidate,))
