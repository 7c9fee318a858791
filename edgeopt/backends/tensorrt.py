"""TensorRT: the ONNX files and the recipes that the device builds its engines from. Nothing is built here.

Up to TensorRT 10 precision is asked for by builder flags ('weak' typing). 11 removed them: an engine has the types of
its ONNX file ('strong' typing), and int8 comes from Q/DQ alone.
"""

from __future__ import annotations

from pathlib import Path

from edgeopt.backends import onnx_export
from edgeopt.backends.backend import Lowered, precision_of, refusal
from edgeopt.errors import LoweringError
from edgeopt.program import Program, Signature
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.manifest import Candidate, EngineRecipe, Refusal
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_checks import refusal as cannot

runtime = "tensorrt"
_NO_DLA = "the DLA wants a scale on every tensor, which no recipe of this version gives; the GPU's engines are there"


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """No TensorRT on the target, or integers that its GPU does not have."""
    if profile.target.tensorrt is None:
        return ("the target has no TensorRT",)
    reason = cannot(precision_of(program), runtime, profile.target)
    return (reason,) if reason else ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidates 'tensorrt-fp32' and 'tensorrt-fp16' of a float program, 'tensorrt-int8' of an integer one.

    Each has a recipe; the engine is built on the device, for its GPU and its TensorRT.
    """
    precision = precision_of(program)
    reasons = refusals(program, profile)
    if reasons:
        return refusal(f"{runtime}-{precision}", "; ".join(reasons))
    try:
        file = onnx_export.write(program, out, opset_max=profile.target.onnx_opset_max)
    except LoweringError as why:
        return refusal(f"{runtime}-{precision}", why)
    candidates, recipes, refused = [], [], []
    for wanted in _precisions(precision, profile):
        name = f"{runtime}-{wanted}"
        reason = _refused(wanted, profile)
        if reason:
            refused.append(Refusal(candidate=name, reason=reason))
            continue
        candidates.append(Candidate(name=name, runtime=runtime, precision=wanted, file=file.name, opset=file.opset))
        recipes.append(recipe(name, wanted, program.signature, profile))
    if profile.dla and precision != "int8":
        refused.append(Refusal(candidate=f"{runtime}-dla", reason=_NO_DLA))
    return Lowered(file.files, tuple(candidates), tuple(recipes), tuple(refused))


def recipe(candidate: str, precision: str, signature: Signature, profile: Profile) -> EngineRecipe:
    """What the device's TensorRT is told: shapes for each input, typing, and the flags of that typing."""
    strong = _is_strong(profile)
    flags = () if strong else _flags(precision, profile)
    shapes = {
        spec.name: {which: _shape(spec.shape, signature, which) for which in ("min", "opt", "max")}
        for spec in signature.inputs
    }
    return EngineRecipe(candidate=candidate, shapes=shapes, typing="strong" if strong else "weak", flags=flags)


def _precisions(precision: str, profile: Profile) -> tuple[str, ...]:
    """What one ONNX file serves: fp32 and whatever else the profile allows, or int8 alone."""
    if precision == "int8":
        return ("int8",)
    return tuple(p for p in profile.precision.allowed if p != "int8")


def _refused(precision: str, profile: Profile) -> str | None:
    reason = cannot(precision, runtime, profile.target)
    if reason is None and precision == "fp16" and _is_strong(profile):
        reason = (
            f"TensorRT {profile.target.tensorrt} takes types from the ONNX file, and float.onnx is in fp32; "
            "a file in fp16 is not written"
        )
    return reason


def _flags(precision: str, profile: Profile) -> tuple[str, ...]:
    """int8 lets fp16 in beside it where that is allowed: what is not quantized need not run in fp32."""
    if precision == "fp32":
        return ()
    if precision == "int8" and "fp16" in profile.precision.allowed and not _refused("fp16", profile):
        return ("fp16", "int8")
    return (precision,)


def _is_strong(profile: Profile) -> bool:
    return version_tuple(profile.target.tensorrt) >= (11,)


def _shape(shape: tuple[int | str, ...], signature: Signature, which: str) -> tuple[int, ...]:
    return tuple(getattr(signature.axes[size], which) if isinstance(size, str) else size for size in shape)
