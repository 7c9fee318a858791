"""A project: what the user says of a model, in `edgeopt.yaml`. Paths are relative to the file's folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, StrictBool, StrictInt, StrictStr

from edgeopt.errors import ProjectError
from edgeopt.spec import adaptive as sizes_served
from edgeopt.spec.adaptive import Adaptive
from edgeopt.spec.camera import BRIGHTEST, DARKEST, Camera, Dimension, Number, Output
from edgeopt.spec.custom_ops import CustomOp, OperatorName
from edgeopt.spec.input_tree import input_tree
from edgeopt.spec.limits import Limits
from edgeopt.spec.manifest import ArtifactName, Axis, Dtype
from edgeopt.spec.overrides import apply_overrides, set_note
from edgeopt.spec.profile_values import PassSetting
from edgeopt.spec.values import Value, did_you_mean, validate
from edgeopt.spec.yaml_file import read_mapping

FILE_NAME = "edgeopt.yaml"
_FILE_KINDS = {".onnx": "onnx", ".pt": "torchscript", ".ts": "torchscript", ".pt2": "exported"}
_ATTRIBUTE = re.compile(r"^(?P<place>[^:]+):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)$")
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")

ModelKind = Literal["factory", "onnx", "torchscript", "exported"]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
AxisName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_]\w*$")]


def model_kind(model: str) -> ModelKind:
    """'factory' for `file.py:name` and `pkg.mod:name`, else by the file's ending; ValueError says why not."""
    match = _ATTRIBUTE.match(model)
    if match and (match["place"].endswith(".py") or _MODULE.match(match["place"])):
        return "factory"
    kind = _FILE_KINDS.get(Path(model).suffix.lower())
    if kind:
        return kind
    if model.endswith(".py"):
        raise ValueError(f"name the factory in the file, as in {model}:build")
    if Path(model).suffix.lower() in (".pth", ".ckpt", ".safetensors"):
        raise ValueError(f"{model} holds weights, not a model: name the factory, and give this file as 'weights'")
    raise ValueError(f"{model!r} is neither file.py:factory, package.module:factory, .onnx, .pt, .ts nor .pt2")


def _function(value: str) -> str:
    match = _ATTRIBUTE.match(value)
    if not match or not (match["place"].endswith(".py") or _MODULE.match(match["place"])):
        raise ValueError(f"{value!r} is not file.py:function or package.module:function")
    return value


def _model(value: str) -> str:
    model_kind(value)
    return value


Function = Annotated[StrictStr, pydantic.AfterValidator(_function)]


class Input(Value):
    """One input of the model; its key is the parameter's name in `forward`, or a dotted path into one."""

    shape: tuple[Dimension, ...] = Field(description="sizes, and names of axes declared under 'axes'")
    dtype: Dtype = Field("float32", description="element type")
    values: tuple[Number, Number] | None = Field(
        None, description="range of valid values [low, high], for example inputs; ids: [0, vocabulary - 1]"
    )
    camera: Camera | None = Field(None, description="frames that the artifact takes in place of the model's input")

    @pydantic.field_validator("shape", mode="before")
    @classmethod
    def _answered(cls, shape: Any) -> Any:
        if shape == "TODO":  # as `edgeopt init` writes it
            raise ValueError("the shape is still to be given, as in [batch, 3, 224, 224]")
        return shape

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Input:
        if self.values is not None and self.values[0] > self.values[1]:
            raise ValueError(f"values: low {self.values[0]} is above high {self.values[1]}")
        return self

    @property
    def given_shape(self) -> tuple[Dimension, ...]:
        """The shape of what the artifact takes: frames where there is a camera."""
        return self.camera.frame_shape(self.shape) if self.camera and len(self.shape) == 4 else self.shape

    @property
    def given_dtype(self) -> Dtype:
        """The element type of what the artifact takes."""
        return self.camera.dtype if self.camera else self.dtype


def _optimizer(value: str) -> str:
    if value not in ("sgd", "adam", "adamw") and not _ATTRIBUTE.match(value):
        raise ValueError(f"{value!r} is not 'sgd', 'adam' or 'adamw', nor a function of yours as in file.py:function")
    return value


class Qat(Value):
    """Quantization-aware fine-tuning; runs where `train` and `loss` are given, or `trainer`, or `state`."""

    epochs: StrictInt = Field(1, ge=1, description="passes over the training batches")
    learning_rate: Number = Field(1e-4, gt=0, description="the highest; `schedule` says how it falls")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="of the learning rate, down to 0")
    warmup_steps: StrictInt = Field(0, ge=0, description="steps over which the learning rate rises first")
    optimizer: Annotated[StrictStr, pydantic.AfterValidator(_optimizer)] = Field(
        "adamw", description="sgd, adam, adamw, or fn(parameters) -> optimizer, or (optimizer, scheduler)"
    )
    weight_decay: Number = Field(0.0, ge=0)
    momentum: Number = Field(0.0, ge=0, lt=1, description="sgd only")
    max_steps: StrictInt | None = Field(None, ge=1, description="stop after so many optimizer steps")
    accumulate: StrictInt = Field(1, ge=1, description="batches whose gradients make one optimizer step")
    clip_norm: Number | None = Field(None, gt=0, description="the most that the norm of all gradients may be")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="autocast; fp16 on cuda only")
    device: Literal["cpu", "cuda"] = "cpu"
    freeze_observers_at: Fraction = Field(0.5, description="fraction of the steps after which ranges stay")
    evaluate_every: StrictInt | None = Field(None, ge=1, description="epochs between calls of evaluate; best one kept")
    patience: StrictInt | None = Field(None, ge=1, description="stop after so many evaluations without a better one")
    metric: StrictStr | None = Field(None, description="the metric of evaluate that counts; else its first")
    checkpoint_every: StrictInt = Field(1, ge=0, description="epochs between checkpoints; 0 for none")
    control: StrictBool = Field(False, description="train the float program by the same steps too, for the record")
    trainer: Function | None = Field(None, description="fn(model): trains in place of edgeopt's own loop")
    state: StrictStr | None = Field(None, description="file of edgeopt.qat.finish: trained already")


class ProjectFile(Value):
    """The format of `edgeopt.yaml`."""

    name: ArtifactName = Field(description="names the artifact: letters, digits, '.', '_', '-'")
    model: Annotated[StrictStr, pydantic.AfterValidator(_model)] = Field(
        description="file.py:factory, package.module:factory, or a .onnx, .pt (TorchScript) or .pt2 file"
    )
    weights: StrictStr | None = Field(None, description="state_dict of the factory's module, loaded with weights_only")
    inputs: dict[StrictStr, Input] = Field(
        min_length=1, description="an entry a tensor; a part of a parameter is PARAMETER.KEY or PARAMETER.0"
    )
    axes: dict[AxisName, Axis] = Field({}, description="named dynamic axes, each {min, opt, max}")
    outputs: dict[StrictStr, Output] = Field({}, description="output name -> softmax, argmax or topk in its place")
    calibration: Function | None = Field(None, description="fn() -> iterable of {input name: batch}; int8 needs it")
    calibration_batches: StrictInt = Field(32, ge=1, description="the most batches that calibration takes")
    train: Function | None = Field(None, description="fn() -> iterable of ({input name: batch}, target); QAT needs it")
    loss: Function | None = Field(None, description="fn(outputs, target) -> scalar tensor; QAT needs it")
    qat: Qat = Qat()
    evaluate: Function | None = Field(None, description="fn(predict) -> {metric: value}, higher is better")
    classifier: StrictBool = Field(False, description="without evaluate: compare top-1 classes as well")
    limits: Limits = Limits()
    adaptive: Adaptive | None = Field(None, description="sizes to serve fast, see docs/runtime.md")
    seed: StrictInt = Field(0, ge=0, lt=2**63)
    data: tuple[StrictStr, ...] = Field((), description="files or folders whose content counts for the stage cache")
    data_version: StrictStr | None = Field(None, description="counts for the stage cache in place of data's content")
    passes: dict[StrictStr, PassSetting] = Field(
        {}, description="graph pass -> on, off, or {setting: value}; wins over the profile"
    )
    rules: tuple[Function, ...] = Field((), description="the project's own fusion rules, each file.py:rule")
    op_libraries: tuple[StrictStr, ...] = Field(
        (), description="Python files and shared libraries that define the model's own operators"
    )
    custom_ops: dict[OperatorName, CustomOp] = Field(
        {}, description="namespace::operator, or domain::Type of an ONNX node -> how other runtimes come by it"
    )
    keep_float: tuple[StrictStr, ...] = Field((), description="module paths or operator patterns kept out of int8")
    keep_fp32: tuple[StrictStr, ...] = Field(
        (), description="module paths or operator patterns kept out of fp16, bf16 and int8"
    )


class Project(ProjectFile):
    """A project as loaded: paths start at `folder`, messages call it `source`; neither is in its dump."""

    folder: Path = Field(exclude=True)
    source: str = Field(exclude=True)

    @property
    def kind(self) -> ModelKind:
        return model_kind(self.model)

    def path(self, relative: str) -> Path:
        """A path of the file, from the project's folder."""
        return self.folder / Path(relative).expanduser()


def load_project(path: Path | str, overrides: Mapping[str, str] | None = None) -> Project:
    """The project in `path`, a file or a folder that holds `edgeopt.yaml`; ProjectError names file and key.

    `overrides`: dotted key -> YAML text, as `--set project.KEY=VALUE` gives. Each file named must exist.
    """
    file = _find(Path(path))
    return _project(read_mapping(file, error=ProjectError), file.parent, str(file), overrides)


def project_for_model(
    model: str,
    *,
    folder: Path | str = ".",
    inputs: Mapping[str, Any] | None = None,
    axes: Mapping[str, Any] | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Project:
    """A project for a MODEL argument alone, without `edgeopt.yaml`.

    `inputs` and `axes` are data as in the file, where the caller could infer them; ProjectError says to run
    `edgeopt init` where they are not known.
    """
    if not inputs and not any(key.split(".")[0] == "inputs" for key in overrides or {}):
        raise ProjectError(
            f"the inputs of {model} are not known: shapes and types stand nowhere", where=str(Path(folder)),
            todo=f"run `edgeopt init {model}`, which writes {FILE_NAME}, and complete it",
        )  # fmt: skip
    data = {"name": name_for(model), "model": model, "inputs": dict(inputs or {}), "axes": dict(axes or {})}
    return _project(data, Path(folder), f"the model {model}", overrides)


def name_for(model: str) -> str:
    """A name for the artifact of MODEL: its file's or module's own, in the letters that a name may have."""
    place = model.rpartition(":")[0] if model_is_factory(model) else model
    stem = Path(place).stem if place.endswith(".py") or not model_is_factory(model) else place.split(".")[-1]
    if stem == "model" and Path(place).resolve().parent.name:
        stem = Path(place).resolve().parent.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "model"


def model_is_factory(model: str) -> bool:
    """Whether MODEL names a factory; ProjectError where it has no form that edgeopt knows."""
    try:
        return model_kind(model) == "factory"
    except ValueError as why:
        raise ProjectError(str(why), todo="give MODEL in one of these forms") from None


def _find(path: Path) -> Path:
    path = path.expanduser()
    if path.is_dir():
        if not (path / FILE_NAME).is_file():
            other = next((n for n in ("edgeopt.yml", "edgopt.yaml", ".edgeopt.yaml") if (path / n).exists()), None)
            raise ProjectError(
                f"there is no {FILE_NAME} in this folder", where=str(path),
                todo=f"rename {other} to {FILE_NAME}" if other else "run `edgeopt init MODEL` first",
            )  # fmt: skip
        return path / FILE_NAME
    if not path.exists():
        raise ProjectError(
            "there is no such project file",
            where=str(path),
            todo="check the path, or run `edgeopt init MODEL`",
        )
    return path


def _project(data: dict[str, Any], folder: Path, source: str, overrides: Mapping[str, str] | None) -> Project:
    data = apply_overrides(data, overrides or {}, model=ProjectFile, scope="project", error=ProjectError)
    source += set_note("project", overrides)
    file = validate(ProjectFile, data, source=source, error=ProjectError)
    values = {key: getattr(file, key) for key in ProjectFile.model_fields}
    project = Project(**values, folder=folder.resolve(), source=source)
    for key, reason, todo in _inconsistent(project):
        raise ProjectError(f"key '{key}': {reason}", where=source, todo=todo)
    for key, name in _named_files(project):
        if not project.path(name).exists():
            raise ProjectError(
                f"key '{key}': there is no file {name}", where=f"{source} (looked for {project.path(name)})",
                todo="correct the path; paths start at the folder of the project file",
            )  # fmt: skip
    return project


def _inconsistent(project: ProjectFile) -> Iterator[tuple[str, str, str]]:
    """(key, reason, what to do) for each contradiction between keys."""
    if model_kind(project.model) != "onnx":  # whose inputs have whatever names the file gives them, as 'input.1'
        try:
            input_tree(list(project.inputs))
        except ValueError as why:
            yield "inputs", str(why), "name a tensor PARAMETER, an item of a tuple PARAMETER.0, a key PARAMETER.KEY"
    for name, spec in project.inputs.items():
        if spec.dtype == "bfloat16":
            reason = "an input cannot be bfloat16: numpy, which calls are made with, has none"
            yield f"inputs.{name}.dtype", reason, "declare float32, and convert it in forward"
    yield from _inconsistent_cameras(project)
    shapes = {name: (*spec.shape, *spec.given_shape) for name, spec in project.inputs.items()}
    used = {axis: name for name, shape in shapes.items() for axis in shape if isinstance(axis, str)}
    for axis, name in used.items():
        if axis not in project.axes:
            near = did_you_mean(axis, list(project.axes))
            hint = f", did you mean '{near}'?" if near else ""
            reason = f"the axis '{axis}' is not declared under 'axes'{hint}"
            yield f"inputs.{name}.shape", reason, f"declare it, as in {axis}: {{min: 1, opt: 1, max: 8}}"
    for axis in project.axes:
        if axis not in used:
            yield f"axes.{axis}", "no input's shape uses this axis", "use it in a shape, or remove it"
    if project.train and not project.loss:
        yield "loss", "train is given, so loss is needed", "add loss: file.py:function, or remove train"
    if project.loss and not project.train:
        yield "train", "loss is given, so train is needed", "add train: file.py:function, or remove loss"
    yield from _inconsistent_qat(project)
    if project.adaptive:
        yield from sizes_served.inconsistent(project.adaptive, project.axes)
    if model_kind(project.model) != "factory":
        for key in ("weights", "train"):
            if getattr(project, key) is not None:
                yield (
                    key,
                    f"it needs a model factory, and model is {project.model}",
                    "give file.py:factory as model",
                )


def _inconsistent_cameras(project: ProjectFile) -> Iterator[tuple[str, str, str]]:
    with_camera = {name: spec for name, spec in project.inputs.items() if spec.camera}
    for name, spec in with_camera.items():
        for key, reason, todo in spec.camera.reasons_against(spec.shape, spec.dtype):
            yield f"inputs.{name}.camera.{key}", reason, todo
        if spec.values and not DARKEST <= spec.values[0] <= spec.values[1] <= BRIGHTEST:
            reason = f"with camera they are a frame's, {DARKEST} to {BRIGHTEST}, and not the model's input's"
            yield f"inputs.{name}.values", reason, "remove it"
    if model_kind(project.model) == "onnx":
        for name in with_camera:
            reason = "an ONNX file is taken as it is"
            yield f"inputs.{name}.camera", reason, "name the model's factory, or let the application prepare the frames"
        if project.outputs:
            yield "outputs", "an ONNX file is taken as it is", "name the model's factory, or remove it"


def _inconsistent_qat(project: ProjectFile) -> Iterator[tuple[str, str, str]]:
    qat = project.qat
    if qat.evaluate_every and not project.evaluate:
        yield "qat.evaluate_every", "there is no evaluate to call", "add evaluate: file.py:function, or remove it"
    for key in ("patience", "metric"):
        if getattr(qat, key) is not None and not qat.evaluate_every:
            reason = "it counts evaluations, and qat.evaluate_every is not given"
            yield f"qat.{key}", reason, "add qat.evaluate_every: 1, or remove it"
    if qat.precision == "fp16" and qat.device != "cuda":
        reason = "fp16 needs gradients scaled and kernels that only a GPU has"
        yield "qat.precision", reason, "write bf16 or fp32, or qat.device: cuda"
    if qat.trainer and qat.state:
        yield "qat.state", "qat.trainer is given too, and both give the trained weights", "remove one of them"


def _named_files(project: Project) -> list[tuple[str, str]]:
    """(key, path) for every file that the project names; modules are looked for when they are imported."""
    out = []
    if project.weights is not None:
        out.append(("weights", project.weights))
    out += [("data", path) for path in project.data]
    out += [("op_libraries", path) for path in project.op_libraries]
    out += [("qat.state", project.qat.state)] if project.qat.state else []
    own = {key: getattr(project.qat, key) for key in ("trainer", "optimizer")}
    for name, op in project.custom_ops.items():
        out += [(f"custom_ops.{name}.{key}", path) for key in ("onnxruntime", "tensorrt") for path in getattr(op, key)]
        if op.onnx is not None and op.onnx.rpartition(":")[0].endswith(".py"):
            out.append((f"custom_ops.{name}.onnx", op.onnx.rpartition(":")[0]))
    functions = [(key, getattr(project, key)) for key in ("model", "calibration", "train", "loss", "evaluate")]
    functions += [(f"qat.{key}", value) for key, value in own.items() if value and ":" in value]
    for key, value in (*functions, *(("rules", rule) for rule in project.rules)):
        if value is None:
            continue
        place = value.rpartition(":")[0] if _ATTRIBUTE.match(value) else value
        if place.endswith(".py") or key == "model" and project.kind != "factory":
            out.append((key, place))
    return out
