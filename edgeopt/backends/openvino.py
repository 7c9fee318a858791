"""OpenVINO: the ONNX files that onnxruntime's candidates name too, and the properties of a compiled model as flags.

OpenVINO computes fp32 in bf16 by itself on a CPU with AMX or AVX512-BF16 (its property INFERENCE_PRECISION_HINT reads
`bf16` there: MobileNetV2 at 30 dB where it gives 120 dB in fp32, 2026.4), so the flag says f32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeopt.backends import custom_ops, onnx_export
from edgeopt.backends.backend import Lowered, precision_of, refusal
from edgeopt.errors import LoweringError
from edgeopt.program import Program, Signature
from edgeopt.spec.manifest import Candidate, Refusal
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_checks import refusal as cannot

runtime = "openvino"
_INT32 = range(-(2**31), 2**31)


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """A target with a GPU, a precision that OpenVINO's kernels lack, and types that it narrows without a word.

    Its CPU plugin computes float64 in float32 and int64 in int32 (measured, 2026.4: 1e300 comes back as 3.4e38, 2^40
    as 0).
    """
    if profile.target.kind != "cpu":
        return (
            "OpenVINO is offered for CPU targets; on this one onnxruntime serves the CPU, and OpenVINO no GPU of it",
        )
    reason = cannot(precision_of(program), runtime, profile.target)
    return (*((reason,) if reason else ()), *_narrowed(program.signature))


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'openvino-fp32' or 'openvino-int8', of the file that is onnxruntime's candidate too.

    Where the profile allows bf16, the fp32 file is 'openvino-bf16' as well: OpenVINO converts it when it loads it.
    """
    precision = precision_of(program)
    name = f"{runtime}-{precision}"
    reasons = refusals(program, profile)
    if reasons:
        return refusal(name, "; ".join(reasons))
    try:
        file = onnx_export.write(program, out, opset_max=profile.target.onnx_opset_max)
    except LoweringError as why:
        return refusal(name, why)
    if foreign := custom_ops.nodes_in(out / file.name):
        return refusal(name, f"OpenVINO has no operator {foreign[0]}, and no extension of it for one is built here")
    candidate = Candidate(
        name=name, runtime=runtime, precision=precision, file=file.name, flags=_flags("f32"), opset=file.opset
    )
    if precision != "fp32" or "bf16" not in profile.precision.allowed:
        return Lowered(files=file.files, candidates=(candidate,))
    name = f"{runtime}-bf16"
    if reason := cannot("bf16", runtime, profile.target):
        return Lowered(file.files, (candidate,), refused=(Refusal(candidate=name, reason=reason),))
    in_bf16 = candidate.model_copy(update={"name": name, "precision": "bf16", "flags": _flags("bf16")})
    return Lowered(file.files, (candidate, in_bf16))


def _narrowed(signature: Signature) -> tuple[str, ...]:
    values = (*signature.inputs, *signature.outputs)
    wide = [
        f"'{spec.name}' is float64, which OpenVINO computes in float32" for spec in values if spec.dtype == "float64"
    ]
    for spec in signature.inputs:
        low, high = signature.values.get(spec.name, (0, 0))
        if spec.dtype == "int64" and not (int(low) in _INT32 and int(high) in _INT32):
            wide.append(f"'{spec.name}' takes values beyond 32 bits, and OpenVINO computes int64 in int32")
    return tuple(wide)


def _flags(precision: str) -> dict[str, Any]:
    """The keys that the runner sets. Threads are left to the runner, which knows the device."""
    return {"intra_op_threads": None, "performance_hint": "latency", "inference_precision": precision}
