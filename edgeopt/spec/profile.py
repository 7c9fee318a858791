"""Profiles by name or path: shipped YAML files, resolved with the facts of module and JetPack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeopt.errors import ProfileError
from edgeopt.spec import jetpack
from edgeopt.spec.overrides import apply_overrides, set_note
from edgeopt.spec.profile_checks import impossible, precisions_of, refusal
from edgeopt.spec.profile_values import (
    VNNI_FLAGS,
    Container,
    Fuser,
    Fusion,
    Profile,
    ProfileFile,
    ResolvedPrecision,
    ResolvedQuantization,
    Target,
    TargetFile,
    TorchRange,
)
from edgeopt.spec.values import did_you_mean, validate
from edgeopt.spec.yaml_file import read_mapping

__all__ = [
    "Profile",
    "ProfileFile",
    "Target",
    "jetpacks_of",
    "load_profile",
    "precisions_of",
    "profile_names",
    "schema",
]


def profile_names() -> list[str]:
    """The shipped profiles, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_profile(name_or_path: str, overrides: Mapping[str, str] | None = None) -> Profile:
    """The profile NAME, NAME@JETPACK, or a file (with '/' or ending in .yaml; FILE@JETPACK too), resolved.

    `overrides`: dotted key -> YAML text, as `--set profile.KEY=VALUE` gives. ProfileError names file, key,
    reason and the closest known name for: an unknown profile or JetPack, an unknown key, a wrong type, and
    whatever the target cannot do.
    """
    path, at = _find(name_or_path)
    source = str(path)
    data = _with_base(read_mapping(path, error=ProfileError), source)
    if at:
        data["jetpack"] = at
    data = apply_overrides(data, overrides or {}, model=ProfileFile, scope="profile", error=ProfileError)
    source += set_note("profile", overrides)
    file = validate(ProfileFile, data, source=source, error=ProfileError)
    name = path.stem + (f"@{at}" if at else "")
    profile = _resolve(file, name=name, source=source)
    wrong = impossible(profile)
    if wrong:
        lines = [f"key '{key}': {reason}" for key, reason, _ in wrong]
        what = lines[0] if len(lines) == 1 else "\n".join(["impossible here:", *("  - " + x for x in lines)])
        raise ProfileError(what, where=source, todo="; ".join(f"{key}: {todo}" for key, _, todo in wrong))
    return profile


def jetpacks_of(profile: Profile) -> tuple[str, ...]:
    """The JetPacks that the profile's module has had, oldest first; () where it is no Jetson."""
    module = jetpack.module(profile.target.module) if profile.target.module else None
    return module.jetpacks if module else ()


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a profile's file.

    Editors read YAML 1.2, where `on` and `off` are text, so a switch may be those words as well.
    """
    out = ProfileFile.model_json_schema()
    out = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **out,
        "title": "edgeopt hardware profile",
    }
    return _with_switches(out)


def _with_switches(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_switches(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "boolean":
        rest = {key: value for key, value in node.items() if key != "type"}
        return {"anyOf": [{"type": "boolean"}, {"enum": ["on", "off", "yes", "no"]}], **rest}
    return {key: _with_switches(value) for key, value in node.items()}


def _folder() -> Path:
    """Where the shipped files lie: inside the package of a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "profiles"
    return inside if inside.is_dir() else package.parent / "profiles"


def _find(name_or_path: str) -> tuple[Path, str | None]:
    """(file, JetPack asked for) of NAME, NAME@JETPACK, FILE or FILE@JETPACK."""
    whole = Path(name_or_path).expanduser()
    if _is_path(name_or_path) and whole.is_file():
        return whole, None
    name, _, at = name_or_path.rpartition("@") if "@" in name_or_path else (name_or_path, "", "")
    if _is_path(name):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ProfileError("there is no such profile file", where=name, todo="check the path")
        return path, at or None
    path = _folder() / f"{name}.yaml"
    if not name or not path.is_file():
        near = did_you_mean(name, profile_names())
        raise ProfileError(
            f"there is no profile '{name}'" + (f", did you mean '{near}'?" if near else ""),
            todo="choose one of: " + ", ".join(profile_names()) + "; or give the path of a file ending in .yaml",
        )
    if "@" in name_or_path and not at:
        raise ProfileError(f"'{name_or_path}' names no JetPack after '@'", todo=f"write {name}@JETPACK, or {name}")
    return path, at or None


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith((".yaml", ".yml"))


def _with_base(data: dict[str, Any], source: str) -> dict[str, Any]:
    """`data` laid over the shipped profile that its `base` names: mappings merge, the rest replaces."""
    base = data.get("base")
    if base is None:
        return data
    if not isinstance(base, str) or _is_path(base):
        raise ProfileError("key 'base': it names a shipped profile", where=source, todo="as in base: xavier")
    path, at = _find(base)
    below = read_mapping(path, error=ProfileError)
    if at:
        below["jetpack"] = at
    return _merged(below, data)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _resolve(file: ProfileFile, *, name: str, source: str) -> Profile:
    row = _release(file, source)
    target = _target(file, row, source)
    fuser, fusion, notes = _for_torch(file.fuser, file.fusion, target)
    return Profile(
        name=name, source=source, title=file.title or name, jetpack=row.jetpack if row else None, target=target,
        precision=ResolvedPrecision(
            allowed=file.precision.allowed, keep_fp32=file.precision.keep_fp32,
            mechanism=file.precision.mechanism or _mechanism(file, target),
        ),
        fuser=fuser, fuser_trials=file.fuser.trials, fusion=fusion, quantization=_quantization(file, target),
        backends=file.backends, passes=file.passes, container=_container(file, row), measure=file.measure,
        limits=file.limits, root=file.root, dla=file.dla,
        after_activate=file.after_activate, health=file.health, notes=(*notes, *_saturation(file, target)),
    )  # fmt: skip


def _release(file: ProfileFile, source: str) -> jetpack.Release | None:
    if file.module is None:
        if file.jetpack is not None:
            raise ProfileError(
                f"key 'jetpack': {file.jetpack} is given, but the profile has no Jetson module", where=source,
                todo="remove the JetPack, or add module: " + " | ".join(m.name for m in jetpack.MODULES),
            )  # fmt: skip
        return None
    module = jetpack.module(file.module)
    if module is None:
        names = [m.name for m in jetpack.MODULES]
        near = did_you_mean(file.module, names)
        hint = f", did you mean '{near}'?" if near else ""
        raise ProfileError(
            f"key 'module': there is no module '{file.module}'{hint}",
            where=source, todo="choose one of: " + ", ".join(names),
        )  # fmt: skip
    row = jetpack.release(file.jetpack or module.jetpacks[-1], module)
    if row is None:
        raise ProfileError(
            f"key 'jetpack': {file.module} has had no JetPack {file.jetpack} that edgeopt knows",
            where=source,
            todo=f"choose one of: {', '.join(module.jetpacks)} (before 4.6 TensorRT reads no Q/DQ)",
        )  # fmt: skip
    return row


def _target(file: ProfileFile, row: jetpack.Release | None, source: str) -> Target:
    """The table's facts, replaced by what the file's `target` says."""
    facts: dict[str, Any] = {}
    if row is not None:
        module = jetpack.module(file.module)
        facts = dict(
            kind="jetson", arch="aarch64", module=module.name, sm=module.sm, memory_gb=module.memory_gb,
            dla_cores=module.dla_cores, l4t=row.l4t, python=row.python, cuda=row.cuda, cudnn=row.cudnn,
            tensorrt=row.tensorrt, torch=TorchRange(min=row.torch_min, max=row.torch_max),
        )  # fmt: skip
    facts |= {key: value for key in TargetFile.model_fields if (value := getattr(file.target, key)) is not None}
    for key in ("kind", "arch"):
        if key not in facts:
            raise ProfileError(
                f"missing key 'target.{key}'", where=source, todo="add it, or name a Jetson with module: NAME"
            )
    if "vnni" not in facts:
        facts["vnni"] = bool(VNNI_FLAGS & set(facts.get("cpu_features", ())))
    if "onnx_opset_max" not in facts:
        # 20: what torch's exporter writes by default and onnxruntime reads from 1.17 on
        facts["onnx_opset_max"] = jetpack.opset_max(facts["tensorrt"]) if "tensorrt" in facts else 20
    return Target(**facts)


def _container(file: ProfileFile, row: jetpack.Release | None) -> Container | None:
    if row is None or (file.container is not None and file.container.base):
        return file.container
    return Container(base=row.base_image, dockerfile=file.container.dockerfile if file.container else None)


def _mechanism(file: ProfileFile, target: Target) -> str:
    """The way to ask for precision that the target's TensorRT has (facts, finding 5)."""
    if target.tensorrt is None or target.sm is None:
        return "cpu"
    version = jetpack.version_tuple(target.tensorrt)
    if version >= (11,):
        return "strong-typed"
    int8 = "int8" in file.precision.allowed and refusal("int8", "tensorrt", target) is None
    return "explicit-qdq" if version >= (8,) and int8 else "weak-flags"


def _for_torch(fuser: Fuser, fusion: Fusion, target: Target) -> tuple[dict[str, Any], Fusion, tuple[str, ...]]:
    """The flags that the target's torch has; each that it lacks becomes a note: nothing goes silently."""
    flags = {key: value for key, value in fuser if value is not None and key != "trials"}
    newest = jetpack.version_tuple(target.torch.max) if target.torch and target.torch.max else None
    notes = []
    if newest is not None:
        # symbols per version: facts, table 'TorchScript flags', read from the aarch64 wheels (H)
        if fusion.strategy and newest < (1, 11):
            fusion = fusion.model_copy(update={"strategy": ()})
            notes.append(f"fusion.strategy left out: torch {target.torch.max} is older than 1.11")
        if flags.get("nvfuser") and (newest >= (2, 2) or newest < (1, 11)):
            del flags["nvfuser"]
            notes.append(f"fuser.nvfuser left out: torch {target.torch.max}; nvFuser is usable from 1.11 to 2.1")
        if "onednn_fusion" in flags and newest < (2, 1):
            del flags["onednn_fusion"]
            notes.append(f"fuser.onednn_fusion left out: torch {target.torch.max} is older than 2.1")
    return flags, fusion, tuple(notes)


def _saturation(file: ProfileFile, target: Target) -> tuple[str, ...]:
    """What is said where 8 bits are asked for on a CPU that sums them in int16."""
    resolved = _quantization(file, target)
    if resolved.placement not in ("onnxruntime-x86", "openvino") or target.vnni or resolved.weight_bits < 8:
        return ()
    return (
        "quantization.weight_bits: 8, but x86 without VNNI sums products in int16, where they saturate; 7 is exact",
    )


def _quantization(file: ProfileFile, target: Target) -> ResolvedQuantization:
    q = file.quantization
    here = "onnxruntime-x86" if target.arch == "x86_64" else "onnxruntime-arm"
    on_gpu = "tensorrt" in file.backends and refusal("int8", "tensorrt", target) is None
    alone = "openvino" in file.backends and "onnxruntime" not in file.backends and target.arch == "x86_64"
    placement = q.placement or ("tensorrt" if on_gpu else "openvino" if alone else here)
    symmetric = "int8-symmetric" if placement == "tensorrt" else "uint8-asymmetric"
    # without VNNI the kernels of both sum pairs of products in int16, which 8-bit weights overflow
    # (measured on MobileNetV2: error .044, with 7 bits .013)
    saturates = placement in ("onnxruntime-x86", "openvino") and not target.vnni
    return ResolvedQuantization(
        placement=placement, activations=q.activations or symmetric,
        weight_bits=q.weight_bits or (7 if saturates else 8), per_channel=q.per_channel, ranges=q.ranges,
        dynamic=q.dynamic,
        improve=q.improve,
    )  # fmt: skip
