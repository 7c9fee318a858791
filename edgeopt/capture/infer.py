"""What a model tells of its own inputs: names, dtypes, shapes with named axes, for a first `edgeopt.yaml`.

In the order of trust: what an ONNX graph declares, what the model's `example_inputs()` returns, and a guess from
the first layer that a trial call confirms. What none of them tells stays unknown and is named.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from edgeopt.capture import script
from edgeopt.capture.arguments import annotations_of, named_parts
from edgeopt.errors import ModelError, ProjectError
from edgeopt.ports import user_code
from edgeopt.spec.manifest import DTYPE_BYTES
from edgeopt.spec.project import model_kind

BATCH = "batch"
_BATCH_AXIS = {"min": 1, "opt": 1, "max": 8}
_IMAGE_SIZES = (224, 32, 28, 64, 96, 128, 160, 192, 256, 299, 320, 384, 416, 512, 640)
_LENGTHS = (128, 16, 64, 256, 512, 1024, 4096, 16000)


@dataclasses.dataclass(frozen=True)
class Inferred:
    """Inputs and axes as the data that `edgeopt.yaml` holds.

    `notes`: input or axis name -> why its entry should be checked. `unknown`: input name -> what is not known;
    such an input is not in `inputs`. `optional`: parameters of forward that have a default.
    """

    inputs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    axes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    optional: tuple[str, ...] = ()


def infer(model: str, folder: Path) -> Inferred:
    """The inputs of MODEL, its paths relative to `folder`. ModelError where it cannot be loaded.

    A Python factory is called, and its module run at most a few times on zeros, in eval mode, as a copy.
    """
    try:
        kind = model_kind(model)
    except ValueError as why:
        raise ProjectError(str(why), todo="give MODEL in one of these forms") from None
    if kind == "factory":
        return _of_factory(model, folder)
    path = folder / Path(model).expanduser()
    if not path.is_file():
        raise ModelError("there is no such model file", where=str(path), todo="check the path")
    if kind == "onnx":
        return _of_onnx(path)
    if kind == "torchscript":
        return _of_script(path)
    raise ModelError(
        "a .pt2 file is not read: it fits only the torch that wrote it", where=str(path),
        todo="name the Python factory that it was exported from",
    )  # fmt: skip


def _of_onnx(path: Path) -> Inferred:
    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as why:  # protobuf raises its own types
        raise ModelError(
            f"the file is not a readable ONNX model: {type(why).__name__}: {why}", where=str(path),
            todo="export or copy it again",
        ) from why  # fmt: skip
    weights = {tensor.name for tensor in graph.initializer}  # IR 3 lists them among the inputs as well
    out = Inferred()
    for value in graph.input:
        if value.name not in weights:
            _add_onnx_input(out, value)
    if not out.inputs and not out.unknown:
        raise ModelError("the ONNX graph has no inputs", where=str(path), todo="check that it is the model you meant")
    return out


def _add_onnx_input(out: Inferred, value: onnx.ValueInfoProto) -> None:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        out.unknown[value.name] = "it is no tensor, and only tensors can be inputs"
        return
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    if dtype not in DTYPE_BYTES:
        out.unknown[value.name] = f"its type {dtype} is not supported"
        return
    if not tensor.HasField("shape"):
        out.unknown[value.name] = "the graph declares no shape for it"
        return
    dims = tensor.shape.dim
    shape = [_onnx_size(out, value.name, i, len(dims), dim) for i, dim in enumerate(dims)]
    out.inputs[value.name] = {"shape": shape, "dtype": dtype}


def _onnx_size(out: Inferred, name: str, position: int, rank: int, dim: Any) -> int | str:
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return dim.dim_value
    given = re.sub(r"\W+", "_", dim.dim_param).strip("_") if dim.dim_param else ""
    unnamed = BATCH if position == 0 else f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}_{position}"
    axis = given if given.isidentifier() else unnamed
    if axis not in out.axes:
        out.axes[axis] = _axis_range(position, rank)
        out.notes[axis] = "dynamic in the graph; the range is guessed"
    return axis


def _axis_range(position: int, rank: int) -> dict[str, int]:
    if position == 0:
        return dict(_BATCH_AXIS)
    return {"min": 32, "opt": 224, "max": 512} if rank == 4 and position >= 2 else {"min": 2, "opt": 16, "max": 128}


def _of_script(path: Path) -> Inferred:
    parameters = script.parameters(script.read(path))
    why = "a TorchScript file names its inputs but not their shapes"
    required = [p.name for p in parameters if p.default is p.empty]
    return Inferred(
        unknown=dict.fromkeys(required, why), optional=tuple(p.name for p in parameters if p.default is not p.empty)
    )


def _of_factory(model: str, folder: Path) -> Inferred:
    made = user_code.load_attribute(model, folder, key="model", error=ModelError)
    beside = getattr(sys.modules.get(getattr(made, "__module__", "")), "example_inputs", None)
    module = made if isinstance(made, nn.Module) else None
    if module is None and callable(made):
        module = user_code.call(made, key="model", base=folder)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"'{model}' gives a {type(module if callable(made) else made).__name__}, not a torch.nn.Module",
            where="key 'model'", todo="name a function without arguments that returns the model, or its class",
        )  # fmt: skip
    named = [p for p in inspect.signature(module.forward).parameters.values() if p.kind not in _UNNAMED]
    required = [p.name for p in named if p.default is p.empty]
    optional = tuple(p.name for p in named if p.default is not p.empty)
    if callable(beside):
        given = user_code.call(beside, key="example_inputs", base=folder)
        return dataclasses.replace(_of_examples(given, [p.name for p in named], required), optional=optional)
    annotation = annotations_of(module.forward)
    parts = [part for name in required for part in named_parts(name, annotation(name))]
    if len(required) == 1 and parts == required:
        return dataclasses.replace(_of_first_layer(module, required[0]), optional=optional)
    why = "add example_inputs() beside the factory, or give the shape" if required else ""
    return Inferred(unknown=dict.fromkeys(parts, why), optional=optional)


_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _of_examples(given: Any, names: list[str], required: list[str]) -> Inferred:
    """Inputs from what `example_inputs()` returned: a tensor, a tuple in forward's order, or a dict by name.

    What one parameter takes may be a dict, tuple or dataclass itself; a dict or tuple that names no parameter is the
    only one that forward takes.
    """
    alone = len(required) == 1 and len(names) == 1
    if alone and isinstance(given, dict) and given and names[0] not in given:
        given = {names[0]: given}
    elif not isinstance(given, dict):
        values = list(given) if isinstance(given, tuple | list) and not _has_fields(given) else [given]
        if alone and len(values) > 1 and not _numbers(values):
            values = [given]
        if len(values) > len(names):
            raise ModelError(
                f"example_inputs() returns {len(values)} values, and forward takes {len(names)}",
                where="example_inputs", todo="return one value for each input, or a dict by name",
            )  # fmt: skip
        given = dict(zip(names, values, strict=False))
    arrays = {path: _array(path, part) for name, value in given.items() for path, part in _parts(name, value)}
    firsts = {array.shape[0] for array in arrays.values() if array.ndim}
    batched = len(firsts) == 1
    out = Inferred()
    for name, array in arrays.items():
        shape: list[int | str] = list(array.shape)
        if batched and shape:
            shape[0] = BATCH
        out.inputs[name] = {"shape": shape, "dtype": array.dtype.name}
        if array.dtype.kind in "iu" and array.size:
            out.inputs[name]["values"] = [int(min(array.min(), 0)), int(array.max())]
            out.notes[name] = "the range of values is that of example_inputs()"
    if batched:
        size = firsts.pop()
        out.axes[BATCH] = {"min": 1, "opt": size, "max": max(8, size)}
        out.notes[BATCH] = "taken to be the first axis; the range is guessed"
    there = {path.split(".")[0] for path in arrays}
    out.unknown.update({name: "example_inputs() does not give it" for name in required if name not in there})
    return out


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of what a parameter takes, by dotted name; None and constants of a class are its defaults."""
    if isinstance(value, Mapping):
        below = list(value.items())
    elif _has_fields(value):
        fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else value._fields
        held = [(name, getattr(value, name)) for name in fields]
        below = [(name, item) for name, item in held if not isinstance(item, bool | int | float | str)]
    elif isinstance(value, tuple | list) and not _numbers(value):
        below = [(str(i), item) for i, item in enumerate(value)]
    else:
        yield path, value
        return
    for key, item in below:
        if "." in str(key) or not str(key):
            raise ModelError(
                f"example_inputs() gives '{path}' the key {key!r}, which has no dotted name", where="example_inputs",
                todo="use keys without dots",
            )  # fmt: skip
        if item is not None:
            yield from _parts(f"{path}.{key}", item)


def _numbers(values: Any) -> bool:
    return all(isinstance(item, bool | int | float) for item in values)


def _has_fields(value: Any) -> bool:
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or hasattr(value, "_fields")


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except TypeError as why:
        raise ModelError(
            f"example_inputs() gives '{name}' as {why}", where="example_inputs", todo="return plain tensors"
        ) from None
    if array.dtype.name not in DTYPE_BYTES or 0 in array.shape:
        raise ModelError(
            f"example_inputs() gives '{name}' as {array.dtype.name} {list(array.shape)}, which cannot be an input",
            where="example_inputs", todo="return numbers, with at least one element",
        )  # fmt: skip
    return array


def _of_first_layer(module: nn.Module, name: str) -> Inferred:
    """The first guess that a trial call of the model on zeros confirms."""
    guesses = next((g for layer in module.modules() if (g := _guesses(layer))), [])
    try:
        trial = copy.deepcopy(module).to("cpu").eval()
    except Exception as why:  # a module may hold what cannot be copied
        return Inferred(unknown={name: f"the model cannot be copied for a trial call: {why}"})
    for shape, dtype, values in guesses:
        if _runs(trial, name, shape, dtype):
            entry: dict[str, Any] = {"shape": [BATCH, *shape], "dtype": dtype}
            if values:
                entry["values"] = values
            return Inferred(
                inputs={name: entry}, axes={BATCH: dict(_BATCH_AXIS)},
                notes={name: "guessed from the first layer; the model runs at it", BATCH: "the range is guessed"},
            )  # fmt: skip
    return Inferred(unknown={name: "no shape guessed from the first layer runs"})


_Guess = tuple[list[int], str, list[int] | None]


def _guesses(layer: nn.Module) -> list[_Guess]:
    """Shapes without the batch axis that a model beginning with `layer` may take, the likeliest first."""
    match layer:
        case nn.Conv2d():
            return [([layer.in_channels, s, s], "float32", None) for s in _IMAGE_SIZES]
        case nn.Conv1d():
            return [([layer.in_channels, s], "float32", None) for s in _LENGTHS]
        case nn.Conv3d():
            return [([layer.in_channels, 16, s, s], "float32", None) for s in (112, 32, 64)]
        case nn.Linear():
            features = layer.in_features
            return [([features], "float32", None), ([16, features], "float32", None)]
        case nn.Embedding():
            return [([16], "int64", [0, layer.num_embeddings - 1])]
        case nn.LSTM() | nn.GRU() | nn.RNN() if layer.batch_first:
            return [([16, layer.input_size], "float32", None)]
    return []


def _runs(module: nn.Module, name: str, shape: list[int], dtype: str) -> bool:
    try:
        with torch.no_grad():
            module(**{name: torch.zeros([2, *shape], dtype=getattr(torch, dtype))})
    except Exception:  # whatever the user's forward raises on a wrong shape
        return False
    return True
