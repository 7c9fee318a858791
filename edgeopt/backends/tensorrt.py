"""TensorRT: the ONNX files and the recipes that the device builds its engines from. Nothing is built here.

Up to TensorRT 10 precision is asked for by builder flags ('weak' typing): one file in fp32 serves fp32, fp16 and bf16.
11 removed the flags: an engine has the types of its ONNX file ('strong' typing), so that fp16 is a file of its own,
and int8 comes from Q/DQ alone. 10 builds either way, as the profile's mechanism says.
"""

from __future__ import annotations

from pathlib import Path

from edgeopt.backends import custom_ops, onnx_export, tensorrt_operators
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
    """The candidate of the program's precision, and those that builder flags make of the same file.

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
    if reason := tensorrt_operators.missing(out / file.name, profile.target.tensorrt):
        return refusal(f"{runtime}-{precision}", reason)
    nodes, arch = custom_ops.nodes_in(out / file.name), profile.target.arch
    if reason := custom_ops.missing_in_tensorrt(nodes, program.custom_ops, arch):
        return refusal(f"{runtime}-{precision}", reason)
    plugins = tuple(library.artifact_path for library in program.custom_ops.for_tensorrt(arch, nodes))
    candidates, recipes, refused = [], [], []
    for wanted in _precisions(precision, profile):
        name = f"{runtime}-{wanted}"
        reason = cannot(wanted, runtime, profile.target)
        if reason:
            refused.append(Refusal(candidate=name, reason=reason))
            continue
        candidates.append(Candidate(name=name, runtime=runtime, precision=wanted, file=file.name, opset=file.opset))
        recipes.append(recipe(name, wanted, program.signature, profile, plugins))
    if profile.dla and precision == "fp32":
        refused.append(Refusal(candidate=f"{runtime}-dla", reason=_NO_DLA))
    return Lowered(file.files, tuple(candidates), tuple(recipes), tuple(refused))


def recipe(
    candidate: str, precision: str, signature: Signature, profile: Profile, plugins: tuple[str, ...] = ()
) -> EngineRecipe:
    """What the device's TensorRT is told: shapes for each input, typing, the flags of that typing, plugin libraries."""
    strong = _is_strong(profile)
    flags = () if strong else _flags(precision, profile)
    shapes = {
        spec.name: {which: _shape(spec.shape, signature, which) for which in ("min", "opt", "max")}
        for spec in signature.inputs
    }
    return EngineRecipe(
        candidate=candidate, shapes=shapes, typing="strong" if strong else "weak", flags=flags, plugins=plugins
    )


def plugin_arguments(recipe: EngineRecipe, version: str) -> tuple[str, ...]:
    """What trtexec of TensorRT `version` is told of the recipe's plugin libraries, when it builds and when it loads.

    A library that registers its plugins when it is loaded is a static one to trtexec. Before 8.6 the option was
    --plugins, which 10 still takes, with a warning (samples/common/sampleOptions.cpp). --setPluginsToSerialize puts
    a library into a version-compatible engine; ours are bound to the device, and the library stays beside them.
    """
    option = "--plugins" if version_tuple(version) < (8, 6) else "--staticPlugins"
    return tuple(f"{option}={library}" for library in recipe.plugins)


def _precisions(precision: str, profile: Profile) -> tuple[str, ...]:
    """What one ONNX file serves: itself, and of a file in fp32 what the builder's flags make of it."""
    by_flag = precision == "fp32" and not _is_strong(profile)
    return tuple(p for p in profile.precision.allowed if p != "int8") if by_flag else (precision,)


def _flags(precision: str, profile: Profile) -> tuple[str, ...]:
    """int8 lets fp16 in beside it where that is allowed: what is not quantized need not run in fp32."""
    if precision == "fp32":
        return ()
    if precision == "int8" and "fp16" in profile.precision.allowed and not cannot("fp16", runtime, profile.target):
        return ("fp16", "int8")
    return (precision,)


def _is_strong(profile: Profile) -> bool:
    return profile.precision.mechanism == "strong-typed"


def _shape(shape: tuple[int | str, ...], signature: Signature, which: str) -> tuple[int, ...]:
    return tuple(getattr(signature.axes[size], which) if isinstance(size, str) else size for size in shape)
