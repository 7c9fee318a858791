"""What a target cannot do, refused when its profile is read, with the key and the reason."""

from __future__ import annotations

from edgeopt.spec import jetpack
from edgeopt.spec.half_formats import HALF_PRECISIONS
from edgeopt.spec.profile_values import Profile, Target

# (backend, kind of target, architecture or None for any) -> what its CPU gains from beside fp32: integer kernels; a
# file of half the size, which onnxruntime computes in fp32 between casts that it inserts itself (its issue 11831); and
# bf16, which oneDNN has kernels for on x86: torch's on each, OpenVINO's where the CPU has the instructions
_CPU_PRECISIONS = (
    ("onnxruntime", "cpu", None, ("fp16", "int8")),
    ("onnxruntime", "jetson", None, ("int8",)),  # its GPU has fp16
    ("openvino", "cpu", "x86_64", ("bf16", "int8")),
    ("torchscript", "cpu", "x86_64", ("bf16",)),
)
# what lowering writes; the hardware may know more
_WRITTEN = ("fp32", "fp16", "bf16", "int8")
# in OpenVINO: with others INFERENCE_PRECISION_HINT goes on reading f32 (measured, 2026.4)
_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
_BF16_BY_ONNX = "nothing here runs an ONNX file in bf16 and could prove it: onnxruntime's CPU has no such kernels"


def precisions_of(profile: Profile, backend: str) -> tuple[str, ...]:
    """The allowed precisions that `backend` gives on the profile's target, in the profile's order."""
    return tuple(p for p in profile.precision.allowed if refusal(p, backend, profile.target) is None)


def refusal(precision: str, backend: str, target: Target) -> str | None:
    """Why `backend` cannot run `precision` on `target`; None where it can.

    int8 is refused by backend, not by device: a Nano's GPU has none, but onnxruntime on its CPU has.
    """
    if backend == "tensorrt" and target.sm is None:
        return "TensorRT needs an NVIDIA GPU"
    if precision == "fp32":
        return None
    on_cpu = target.sm is None or (backend == "onnxruntime" and target.kind == "jetson")
    if on_cpu:
        return _refusal_on_cpu(precision, backend, target)
    lacking = getattr(jetpack.capability(target.sm), precision)
    if lacking:
        return lacking
    if precision not in _WRITTEN:
        return f"the GPU has {precision}, but edgeopt does not write it yet"
    if backend == "torchscript" and precision == "int8":
        return "TorchScript has no int8 kernels on a GPU"
    if precision == "bf16":
        return _refusal_of_bf16(backend, target)
    return None


def by_flag(precision: str, backend: str, profile: Profile) -> bool:
    """Whether the backend makes the 16-bit precision of the fp32 file itself, as TensorRT's builder flags do."""
    if backend == "openvino":
        return precision == "bf16"
    return backend == "tensorrt" and precision in HALF_PRECISIONS and profile.precision.mechanism != "strong-typed"


def _refusal_on_cpu(precision: str, backend: str, target: Target) -> str | None:
    for name, kind, arch, precisions in _CPU_PRECISIONS:
        if (name, kind) == (backend, target.kind) and arch in (None, target.arch) and precision in precisions:
            return _without_bf16(target) if (backend, precision) == ("openvino", "bf16") else None
    return f"{backend} has no {precision} kernels that gain anything on this CPU"


def _without_bf16(target: Target) -> str | None:
    if _BF16_FLAGS & set(target.cpu_features):
        return None
    return (
        f"OpenVINO computes in bf16 on CPUs with {' or '.join(sorted(_BF16_FLAGS))}, and target.cpu_features names "
        "neither; `build --on HOST` reads them from the device"
    )


def _refusal_of_bf16(backend: str, target: Target) -> str | None:
    """Of a GPU that has it. TensorRT 9 and 10 take it by a builder flag (their release notes), torch by its file."""
    if backend == "onnxruntime":
        return _BF16_BY_ONNX
    if backend == "tensorrt" and target.tensorrt is not None:
        version = jetpack.version_tuple(target.tensorrt)
        if version < (9,):
            return f"TensorRT {target.tensorrt} has no bf16: it came with 9.0"
        if version >= (11,):
            return f"TensorRT {target.tensorrt} takes bf16 from the file alone, and {_BF16_BY_ONNX}"
    return None


def impossible(profile: Profile) -> list[tuple[str, str, str]]:
    """(key, reason, what to do) for every combination in `profile` that its target cannot do."""
    target = profile.target
    return [
        *_machine(target),
        *_gpu(profile),
        *_precisions(profile),
        *_opset(target),
        *_quantization(profile),
    ]


def _machine(target: Target) -> list[tuple[str, str, str]]:
    out = []
    if target.kind == "jetson" and target.arch != "aarch64":
        out.append(("target.arch", f"a Jetson is aarch64, not {target.arch}", "remove the key"))
    if target.kind == "cpu":
        for key in ("sm", "tensorrt", "cuda", "l4t"):
            if getattr(target, key) is not None:
                out.append((f"target.{key}", "a target of kind cpu has no GPU", "remove it, or set target.kind"))
    elif target.sm is None:
        out.append(("target.sm", f"a target of kind {target.kind} needs its compute capability", 'add sm: "8.7"'))
    x86_only = [f for f in target.cpu_features if f.startswith(("avx", "sse", "amx"))]
    arm_only = [f for f in target.cpu_features if f.startswith(("asimd", "neon", "sve", "i8mm"))]
    if target.arch == "aarch64" and x86_only:
        out.append(("target.cpu_features", f"{x86_only[0]} is an x86 feature; the target is aarch64", "remove it"))
    if target.arch == "x86_64" and arm_only:
        out.append(("target.cpu_features", f"{arm_only[0]} is an ARM feature; the target is x86_64", "remove it"))
    if target.vnni and target.arch != "x86_64":
        out.append(("target.vnni", "VNNI is an x86 instruction set; the target is aarch64", "remove the key"))
    return out


def _gpu(profile: Profile) -> list[tuple[str, str, str]]:
    target, out = profile.target, []
    if profile.dla and target.dla_cores == 0:
        what = f"the module {target.module}" if target.module else f"a target of kind {target.kind}"
        out.append(("dla", f"{what} has no DLA", "remove the key"))
    elif profile.dla and "tensorrt" not in profile.backends:
        out.append(("dla", "only TensorRT uses the DLA, and it is no backend here", "add tensorrt to backends"))
    if "tensorrt" in profile.backends and target.sm is None:
        out.append(("backends", "TensorRT needs an NVIDIA GPU; the target has none", "remove tensorrt"))
    elif "tensorrt" in profile.backends and target.tensorrt is None:
        out.append(("target.tensorrt", "the backend tensorrt needs the target's version", 'add tensorrt: "10.3"'))
    if len(set(profile.backends)) != len(profile.backends):
        out.append(("backends", "a backend stands twice", "name each once"))
    if profile.fuser.get("fuse_on_gpu") and target.sm is None:
        out.append(("fuser.fuse_on_gpu", "the target has no GPU", "remove the key"))
    if profile.fuser.get("nvfuser") and target.sm is None:
        out.append(("fuser.nvfuser", "nvFuser compiles for NVIDIA GPUs; the target has none", "remove the key"))
    return out


def _precisions(profile: Profile) -> list[tuple[str, str, str]]:
    target, out = profile.target, []
    if "fp32" not in profile.precision.allowed:
        out.append((
            "precision.allowed", "fp32 is missing: the others are judged against it and fall back to it",
            "add fp32",
        ))  # fmt: skip
    for precision in profile.precision.allowed:
        reasons = [refusal(precision, backend, target) for backend in profile.backends]
        if all(reasons):
            fix = f"remove {precision}"
            if precision == "int8" and "onnxruntime" not in profile.backends:
                fix += ", or add onnxruntime to backends for the CPU's int8"
            distinct = dict.fromkeys(f"{r} (backend {b})" for r, b in zip(reasons, profile.backends, strict=True))
            out.append(("precision.allowed", f"{precision} cannot run here: " + "; ".join(distinct), fix))
    return out + _mechanism(profile)


def _mechanism(profile: Profile) -> list[tuple[str, str, str]]:
    target, mechanism = profile.target, profile.precision.mechanism
    if target.tensorrt is None or target.sm is None:
        wrong = (
            None if mechanism == "cpu" else "the target has no TensorRT, so its precision is the CPU's or the file's"
        )
    elif jetpack.version_tuple(target.tensorrt) >= (11,):
        # TensorRT 11 removed the fp16 and int8 builder flags and implicit quantization (facts, finding 5; H)
        wrong = None if mechanism == "strong-typed" else f"TensorRT {target.tensorrt} builds strongly typed only"
    elif mechanism == "cpu":
        wrong = f"the target builds with TensorRT {target.tensorrt}"
    elif mechanism == "strong-typed" and jetpack.version_tuple(target.tensorrt) < (10,):
        wrong = f"strongly typed fp16 with Q/DQ needs TensorRT 10; the target has {target.tensorrt}"
    elif mechanism == "weak-flags" and "int8" in precisions_of(profile, "tensorrt"):
        wrong = "int8 by weak flags needs a calibration cache, which edgeopt does not write yet"
    else:
        wrong = None
    return (
        [("precision.mechanism", f"{mechanism}: {wrong}", "remove the key: it follows from TensorRT")] if wrong else []
    )


def _opset(target: Target) -> list[tuple[str, str, str]]:
    if target.tensorrt is None:
        return []
    most = jetpack.opset_max(target.tensorrt)
    if target.onnx_opset_max <= most:
        return []
    reason = f"opset {target.onnx_opset_max} is above what TensorRT {target.tensorrt} reads: at most {most}"
    return [("target.onnx_opset_max", reason, f"set it to {most} or remove it")]


def _quantization(profile: Profile) -> list[tuple[str, str, str]]:
    q, target, out = profile.quantization, profile.target, []
    here = {"x86_64": "onnxruntime-x86", "aarch64": "onnxruntime-arm"}[target.arch]
    if q.placement == "tensorrt" and target.sm is None:
        out.append(("quantization.placement", "Q/DQ for TensorRT, but the target has no GPU", f"set it to {here}"))
    if q.placement.startswith("onnxruntime") and q.placement != here:
        out.append(("quantization.placement", f"{q.placement}, but the target is {target.arch}", f"set it to {here}"))
    if q.placement == "openvino" and (target.arch != "x86_64" or "openvino" not in profile.backends):
        out.append((
            "quantization.placement", "Q/DQ for OpenVINO, which is no backend here or has no int8 on this CPU",
            f"add openvino to backends of an x86 target, or set it to {here}",
        ))  # fmt: skip
    if q.placement == "tensorrt" and q.activations != "int8-symmetric":
        # TensorRT reads Q/DQ with zero point 0 only (facts, 'Q/DQ for TensorRT'; H)
        out.append(("quantization.activations", "TensorRT needs a zero point of 0", "set it to int8-symmetric"))
    return out
