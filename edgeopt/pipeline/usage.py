"""`usage/` of an artifact: how pipelines in C++ use it, by trtexec, DeepStream's nvinfer and onnxruntime's C++ API.

What is written follows from the manifest and the project alone, so that it is part of the artifact's files. Sources:
DeepStream's Gst-nvinfer page, "Gst-nvinfer File Configuration Specifications" (y = net-scale-factor * (x - offset), one
factor for all channels; engine files named ONNX_bBATCH_gpu0_PRECISION.engine); trtexec --help of TensorRT 8.5 to 10.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from edgeopt.pipeline import usage_cpp
from edgeopt.program import Signature
from edgeopt.spec.camera import Camera
from edgeopt.spec.manifest import Candidate, EngineRecipe, TensorSpec
from edgeopt.spec.project import Project

FOLDER = "usage"
_NETWORK_MODE = {"fp32": 0, "int8": 1, "fp16": 2}
_COLOR_FORMAT = {"RGB": 0, "BGR": 1}
_GRAY = 2


@dataclass(frozen=True)
class Shipped:
    """What an artifact holds, as far as a pipeline asks: `libraries` are those that onnxruntime loads."""

    project: Project
    profile: str
    tensorrt: str | None
    signature: Signature
    candidates: tuple[Candidate, ...]
    recipes: tuple[EngineRecipe, ...]
    libraries: tuple[str, ...]


def write(shipped: Shipped, folder: Path) -> set[str]:
    """Write `usage/` into the artifact's folder; the files' names. Nothing where there is no ONNX file."""
    texts = {}
    engine = _best(shipped, "tensorrt")
    if engine is not None:
        texts["trtexec.sh"] = _trtexec(shipped)
        picture = _picture(shipped)
        if picture is not None:
            texts["config_infer_primary.txt"] = _nvinfer(shipped, engine, picture)
    candidate = _best(shipped, "onnxruntime")
    if candidate is not None:
        texts["onnxruntime.cpp"] = usage_cpp.program(
            f"{shipped.project.name} for {shipped.profile}", candidate, shipped.signature, _words(shipped),
            tuple(library for library in shipped.libraries),
        )  # fmt: skip
    if not texts:
        return set()
    texts["README.md"] = _readme(shipped, tuple(texts))
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / FOLDER / name).write_text(text, encoding="utf-8")
    return {f"{FOLDER}/{name}" for name in texts}


def _best(shipped: Shipped, runtime: str) -> Candidate | None:
    """The runtime's candidate that is expected to be the fastest: int8 before 16 bits before fp32."""
    order = ("int8", "fp16", "bf16", "fp32")
    own = [c for c in shipped.candidates if c.runtime == runtime]
    return min(own, key=lambda c: order.index(c.precision), default=None)


def _camera(shipped: Shipped, name: str) -> Camera | None:
    given = shipped.project.inputs.get(name)
    return given.camera if given is not None else None


def _words(shipped: Shipped) -> dict[str, str]:
    """What each input holds, in words."""
    return {spec.name: _input_words(spec, _camera(shipped, spec.name), shipped) for spec in shipped.signature.inputs}


def _input_words(spec: TensorSpec, camera: Camera | None, shipped: Shipped) -> str:
    if camera is None:
        return "as the model's forward takes it"
    order = f", channels {camera.color}" if camera.color else ""
    done = [f"(x * {camera.scale:.9g} - {_list(camera.mean)}) / {_list(camera.std)}"]
    if camera.size is not None:
        model = shipped.project.inputs[spec.name].shape[2:]
        done.insert(0, f"{camera.resize} resize to {model[0]} x {model[1]}, {camera.fit}")
    if camera.swaps:
        done.insert(-1, f"channels to {camera.model_color}")
    return f"frames {camera.layout}{order}, values 0 to 255; inside: {'; '.join(done)}"


def _list(values: tuple[float, ...]) -> str:
    return f"{values[0]:.9g}" if len(values) == 1 else "[" + ", ".join(f"{value:.9g}" for value in values) + "]"


# trtexec


def _trtexec(shipped: Shipped) -> str:
    lines = [
        "#!/bin/sh",
        f"# {shipped.project.name} for {shipped.profile}: engines by trtexec of TensorRT {shipped.tensorrt}.",
        "# Run on the device: an engine fits the GPU and the TensorRT that it was built with.",
        'cd "$(dirname "$0")/.." || exit 1',
    ]  # fmt: skip
    files = {c.name: c.file for c in shipped.candidates}
    for recipe in shipped.recipes:
        argv = _build(recipe, files[recipe.candidate], shipped.tensorrt or "")
        lines += ["", " \\\n  ".join(shlex.quote(argument) for argument in argv)]
    return "\n".join(lines) + "\n"


def _build(recipe: EngineRecipe, file: str, version: str) -> list[str]:
    from edgeopt.backends.tensorrt import plugin_arguments

    argv = ["trtexec", f"--onnx={file}", f"--saveEngine={recipe.candidate}.engine", "--timingCacheFile=timing.cache"]
    argv += ["--stronglyTyped"] if recipe.typing == "strong" else [f"--{flag}" for flag in recipe.flags]
    if any(shapes["min"] != shapes["max"] for shapes in recipe.shapes.values()):  # else the file's sizes are fixed
        for which in ("min", "opt", "max"):
            sizes = ",".join(f"{name}:{'x'.join(map(str, of[which]))}" for name, of in recipe.shapes.items())
            argv.append(f"--{which}Shapes={sizes}")
    return argv + list(plugin_arguments(recipe, version))


# DeepStream


def _picture(shipped: Shipped) -> TensorSpec | None:
    """The one input where it is a batch of pictures of a fixed number of channels; else None."""
    if len(shipped.signature.inputs) != 1:
        return None
    spec = shipped.signature.inputs[0]
    return spec if len(spec.shape) == 4 and not isinstance(_channels(spec, shipped), str) else None


def _channels(spec: TensorSpec, shipped: Shipped) -> int | str:
    camera = _camera(shipped, spec.name)
    return spec.shape[-1] if camera is not None and camera.layout == "HWC" else spec.shape[1]


def _nvinfer(shipped: Shipped, candidate: Candidate, spec: TensorSpec) -> str:
    camera = _camera(shipped, spec.name)
    sizes = [shipped.signature.axes[s].opt if isinstance(s, str) else s for s in spec.shape]
    largest = shipped.signature.axes[spec.shape[0]].max if isinstance(spec.shape[0], str) else spec.shape[0]
    hwc = camera is not None and camera.layout == "HWC"
    channels, height, width = (sizes[3], sizes[1], sizes[2]) if hwc else sizes[1:]
    color = _GRAY if channels == 1 else _COLOR_FORMAT[(camera.color or camera.model_color) if camera else "RGB"]
    notes = _nvinfer_notes(camera, spec)
    engine = f"../{candidate.file}_b{largest}_gpu0_{candidate.precision}.engine"
    rows = [
        ("gpu-id", 0),
        ("gie-unique-id", 1),
        ("onnx-file", f"../{candidate.file}"),
        ("model-engine-file", engine),
        ("batch-size", largest),
        ("network-mode", _NETWORK_MODE.get(candidate.precision, 0)),
        ("infer-dims", f"{channels};{height};{width}"),
        ("network-input-order", 1 if hwc else 0),
        ("model-color-format", color),
        ("net-scale-factor", 1.0),
        ("offsets", ";".join(["0.0"] * channels)),
        ("network-type", 100),
        ("output-tensor-meta", 1),
        ("output-blob-names", ";".join(shipped.signature.output_names)),
    ]
    if camera is not None and camera.dtype == "uint8":
        rows.append(("input-tensor-from-meta", 1))
    if candidate.precision == "int8":
        notes.append(
            "The file holds its integer scales (Q/DQ) and needs no calibration file, which nvinfer asks for in int8: "
            f"build by trtexec.sh first, and move {candidate.name}.engine to the name below."
        )
    head = [
        f"{shipped.project.name} for {shipped.profile}: DeepStream's nvinfer. Paths are relative to this file.",
        *notes,
    ]
    body = [f"{key}={value}" for key, value in rows]
    return "\n".join([*(f"# {' '.join(note.split())}" for note in head), "[property]", *body]) + "\n"


def _nvinfer_notes(camera: Camera | None, spec: TensorSpec) -> list[str]:
    """What nvinfer's y = net-scale-factor * (x - offset) cannot say of this input, and what does."""
    folded = "camera: {dtype: float32, layout: CHW, color: RGB, scale: ..., mean: ..., std: ...}"
    if camera is None:
        return [
            f"'{spec.name}' is what the model's forward takes, and edgeopt does not know how you normalise it: write "
            "net-scale-factor and offsets.",
            "nvinfer has one factor for all channels, and cannot express a std for each. Build with "
            f"{folded} in the project, and the artifact normalises; the two lines stay 1 and 0.",
        ]
    inside = "The artifact normalises inside, a std for each channel included: net-scale-factor stays 1, the offsets 0."
    if camera.dtype == "float32" and camera.layout == "CHW":
        return [inside]
    given = f"{camera.dtype} {camera.layout}"
    if camera.dtype == "uint8":
        return [
            inside,
            f"'{spec.name}' takes {given}, and nvinfer itself makes planar float32 of frames: attach frames as they "
            "are by nvdspreprocess (tensor-data-type UINT8), which input-tensor-from-meta below asks for,",
            f"or build with {folded} in the project for nvinfer alone.",
        ]
    other = f"'{spec.name}' takes {given}, and nvinfer makes planar frames: build with layout: CHW for it alone."
    return [inside, other]


# the page


def _readme(shipped: Shipped, files: tuple[str, ...]) -> str:
    words = _words(shipped)
    about = {
        "trtexec.sh": "builds the engines on the device",
        "config_infer_primary.txt": "DeepStream's nvinfer; its first lines say what it cannot express",
        "onnxruntime.cpp": "one call by onnxruntime's C++ API, to start from",
    }
    lines = [f"# {shipped.project.name} for {shipped.profile}", "", "| file | |", "|---|---|"]
    lines += [f"| `{name}` | {about[name]} |" for name in files]
    lines += ["", "| input | type | shape | holds |", "|---|---|---|---|"]
    for spec in shipped.signature.inputs:
        shape = _shape(spec, shipped.signature)
        lines.append(f"| `{_cell(spec.name)}` | {spec.dtype} | {shape} | {_cell(words[spec.name])} |")
    lines += ["", "| output | type | shape | holds |", "|---|---|---|---|"]
    heads = _head_words(shipped)
    for spec in shipped.signature.outputs:
        shape = _shape(spec, shipped.signature)
        lines.append(f"| `{_cell(spec.name)}` | {spec.dtype} | {shape} | {_cell(heads.get(spec.name, ''))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _head_words(shipped: Shipped) -> dict[str, str]:
    from edgeopt.program import heads

    found = {}
    for name, head in shipped.project.outputs.items():
        said = f"top {head.k}" if head.head == "topk" else head.head
        found |= {made: f"{said} over axis {head.axis} of the model's '{name}'" for made in heads.names(name, head)}
    return found


def _shape(spec: TensorSpec, signature: Signature) -> str:
    def size(of: int | str) -> str:
        axis = signature.axes.get(of) if isinstance(of, str) else None
        return str(of) if axis is None else f"{of} ({axis.min} to {axis.max})"

    return "[" + ", ".join(size(of) for of in spec.shape) + "]"
