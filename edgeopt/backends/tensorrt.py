"""TensorRT: the ONNX files and the recipes that the device builds its engines from. Nothing is built here.

Up to TensorRT 10 precision is asked for by builder flags ('weak' typing): one file in fp32 serves fp32, fp16 and bf16.
11 removed the flags: an engine has the types of its ONNX file ('strong' typing), so that fp16 is a file of its own,
and int8 comes from Q/DQ alone. 10 builds either way, as the profile's mechanism says. With `dla` in the profile there
is one more candidate of fp16 and of int8, whose layers run on the DLA where it takes them, else on the GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgeopt.backends import custom_ops, implicit_scales, onnx_export, tensorrt_operators
from edgeopt.backends.backend import Lowered, precision_of, refusal
from edgeopt.backends.onnx_file import OnnxFile
from edgeopt.errors import LoweringError
from edgeopt.program import Program, Signature
from edgeopt.progress import log
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.manifest import Candidate, EngineRecipe, Refusal
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_checks import refusal as cannot

runtime = "tensorrt"
_DLA_SMS = ("7.2", "8.7")
_DLA_LEFT, _DLA_BACK = (11,), (11, 4, 1)  # TensorRT without a DLA begins and ends here (facts, 'DLA'; H)


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """No TensorRT on the target, or integers that its GPU does not have."""
    if profile.target.tensorrt is None:
        return ("the target has no TensorRT",)
    reason = cannot(precision_of(program), runtime, profile.target) or _no_bytes(program, profile.target.tensorrt)
    return (reason,) if reason else ()


def _no_bytes(program: Program, version: str) -> str | None:
    """TensorRT takes uint8 inputs from 8.5 on (its release notes, 8.5.1)."""
    names = [spec.name for spec in program.signature.inputs if spec.dtype == "uint8"]
    if not names or version_tuple(version) >= (8, 5):
        return None
    return f"TensorRT {version} takes no uint8, which the input '{names[0]}' is; with camera, write dtype: float32"


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
    lowered = Lowered(file.files, tuple(candidates), tuple(recipes), tuple(refused))
    return _with_dla(lowered, file, program, profile, out, plugins) if profile.dla else lowered


def _with_dla(
    lowered: Lowered, file: OnnxFile, program: Program, profile: Profile, out: Path, plugins: tuple[str, ...]
) -> Lowered:
    """And the candidate for the DLA that the program gives; none of a precision that the DLA gets from another one."""
    wanted = {
        ("weak", "fp32"): "fp16",
        ("weak", "int8"): "int8",
        ("strong", "fp16"): "fp16",
        ("strong", "int8"): "int8",
    }
    typing = "strong" if _is_strong(profile) else "weak"
    precision = wanted.get((typing, precision_of(program)))
    if precision is None or precision not in profile.precision.allowed:
        return lowered
    name, files = f"{runtime}-{precision}-dla", lowered.files
    try:
        reason = _refusal_of_dla(precision, program.signature, profile)
        more = {"dla": True}
        if not reason and precision == "int8":
            implicit = implicit_scales.write(out / file.name, out, tensorrt=profile.target.tensorrt)
            files = (*files, *implicit.files)
            if implicit.without:
                log.info("%s: without a scale, and fp16 there: %s", name, ", ".join(implicit.without))
            more |= {"onnx": implicit_scales.FILE, "calibration": implicit_scales.CALIBRATION}
    except LoweringError as why:
        reason = why.what
    if reason:
        return dataclasses.replace(lowered, refused=(*lowered.refused, Refusal(candidate=name, reason=reason)))
    candidate = Candidate(name=name, runtime=runtime, precision=precision, file=file.name, opset=file.opset)
    made = recipe(name, precision, program.signature, profile, plugins).model_copy(update=more)
    return dataclasses.replace(
        lowered, files=files, candidates=(*lowered.candidates, candidate), recipes=(*lowered.recipes, made)
    )


def _refusal_of_dla(precision: str, signature: Signature, profile: Profile) -> str | None:
    """Why the target's DLA cannot run the program in `precision`; None where it can.

    The DLA takes no moving sizes (TensorRT's documentation, "DLA Supported Layers and Restrictions").
    """
    target, version = profile.target, version_tuple(profile.target.tensorrt)
    if target.sm not in _DLA_SMS:
        return f"a GPU of sm {target.sm} has no DLA beside it: Xavier (7.2) and Orin (8.7) have"
    if _DLA_LEFT <= version < _DLA_BACK:
        return f"TensorRT {target.tensorrt} has no DLA: it left with 11.0 and is back with 11.4.1"
    if _is_strong(profile) and version < _DLA_BACK:
        return f"TensorRT {target.tensorrt} takes no strongly typed network to the DLA"
    if precision == "int8" and version >= _DLA_LEFT:
        return "the DLA's int8 takes scales of a calibration file, which TensorRT 11 does not read; its fp16 is there"
    moving = [f"{name} from {axis.min} to {axis.max}" for name, axis in signature.axes.items() if axis.min != axis.max]
    return (
        f"the DLA takes no moving sizes ({', '.join(moving)}): give each axis min, opt and max alike"
        if moving
        else None
    )


def recipe(
    candidate: str, precision: str, signature: Signature, profile: Profile, plugins: tuple[str, ...] = ()
) -> EngineRecipe:
    """What the device's TensorRT is told: shapes for each moving input, typing, its flags, plugin libraries.

    A file has an axis of one possible size as that size, and trtexec takes no shapes for a file without moving sizes.
    """
    strong = _is_strong(profile)
    flags = () if strong else _flags(precision, profile)
    shapes = {
        spec.name: {which: _shape(spec.shape, signature, which) for which in ("min", "opt", "max")}
        for spec in signature.inputs
        if any(isinstance(s, str) and signature.axes[s].min != signature.axes[s].max for s in spec.shape)
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
