"""Capture of an ONNX file: taken as it is, checked, and run by onnxruntime without optimizations for the reference."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeopt.capture import guard, inputs, reference
from edgeopt.capture.declined import first_line
from edgeopt.capture.eager import Answer
from edgeopt.errors import ModelError, ProjectError
from edgeopt.program import OnnxGraph, Signature, custom_ops
from edgeopt.program.custom_ops import CustomOps
from edgeopt.spec.project import Project
from edgeopt.spec.values import did_you_mean

if TYPE_CHECKING:
    import onnx

_INTEGER_OPERATORS = {
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger",
    "MatMulInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QAttention", "MatMulNBits",
}  # fmt: skip
_INLINE_LIMIT_BYTES = 2_000_000_000  # protobuf holds less than 2 GiB in one message


def capture(project: Project) -> OnnxGraph:
    """The project's ONNX file as an OnnxGraph with reference calls.

    Raises ModelError (no valid ONNX, or onnxruntime cannot run it), ProjectError (inputs that do not fit the
    file's), DataError (calibration data).
    """
    path = project.path(project.model)
    model = read(path)
    _check_inputs(model, project)
    own = custom_ops.of(project)
    custom_ops.load(own)
    session = _Session(path, own)
    signature = Signature(inputs.input_specs(project), (), project.axes, None, inputs.value_ranges(project))
    tried, notes = guard.probes(session, signature, project.seed)
    first = tried[0].answer
    signature = dataclasses.replace(
        signature, outputs=guard.output_specs(signature, tried), output_structure=first.structure
    )
    return OnnxGraph(
        signature=signature,
        reference=reference.reference_calls(session, signature, project),
        notes=(f"taken as it is from {path.name} (opset {_opset(model)})", *notes),
        model=model,
        custom_ops=own,
        integer=any(node.op_type in _INTEGER_OPERATORS for node in model.graph.node),
    )


def as_given(project: Project) -> _Session:
    """The project's ONNX file in onnxruntime, to be asked for its answers. Raises ModelError."""
    own = custom_ops.of(project)
    custom_ops.load(own)
    return _Session(project.path(project.model), own)


def read(path: Path) -> onnx.ModelProto:
    """The checked model of a file, its external data read in. Raises ModelError.

    onnx itself refuses external data that lies outside the file's folder.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path))
        return onnx.load(str(path))
    except Exception as why:  # protobuf's, the checker's and the file system's errors have no common base
        raise ModelError(
            f"the ONNX file is not valid: {first_line(why)}", where=f"key 'model': {path}",
            todo="export or copy it again; external data must lie beside it",
        ) from why  # fmt: skip


def write(model: onnx.ModelProto, path: Path) -> None:
    """Write the model, its weights in a file beside it where they are too large for one."""
    import onnx

    apart = model.ByteSize() > _INLINE_LIMIT_BYTES
    onnx.save(model, str(path), save_as_external_data=apart, location=path.name + ".data" if apart else None)


class _Session:
    """The file under onnxruntime, unoptimised: what `eager.Eager` is for a Python model."""

    def __init__(self, path: Path, own: CustomOps):
        from edgeopt.program.onnx_session import open_session

        try:
            self._session = open_session(path, own, as_written=True)
        except Exception as why:
            raise ModelError(
                f"onnxruntime cannot load the file: {first_line(why)}", where=f"key 'model': {path}",
                todo=_what_to_add(why) or "export it with operators and an opset that onnxruntime knows",
            ) from why  # fmt: skip
        self._names = [output.name for output in self._session.get_outputs()]

    def answer(self, arrays: dict[str, np.ndarray]) -> Answer:
        try:
            values = self._session.run(None, arrays)
        except Exception as why:
            shapes = ", ".join(f"{k} {list(v.shape)}" for k, v in arrays.items())
            raise ModelError(
                f"the model fails on {shapes}: {first_line(why)}", where="key 'model'",
                todo="correct the shapes, axes and values of 'inputs' in the project",
            ) from why  # fmt: skip
        nodes = {name: {"kind": "tensor", "index": i} for i, name in enumerate(self._names)}
        structure = {"kind": "dict", "items": nodes, "order": list(self._names)}
        return Answer(dict(zip(self._names, values, strict=True)), structure, False)


def _what_to_add(why: Exception) -> str | None:
    """The key for a node that onnxruntime does not know."""
    found = re.search(r"([\w.]+):(\w+)\(-?\d+\) is not a registered", str(why))
    if not found:
        return None
    node = f"{found[1]}::{found[2]}"
    return f"add to the project custom_ops: {{'{node}': {{onnxruntime: LIBRARY.so}}}}, a library that registers it"


def _check_inputs(model: onnx.ModelProto, project: Project) -> None:
    import onnx

    with_value = {tensor.name for tensor in model.graph.initializer}
    held = {value.name: value.type.tensor_type for value in model.graph.input if value.name not in with_value}
    for name in project.inputs:
        if name not in held:
            near = did_you_mean(name, list(held))
            raise ProjectError(
                f"the input '{name}' is none of the file's" + (f", did you mean '{near}'?" if near else ""),
                where=f"key 'inputs.{name}'; {project.model}", todo="its inputs are: " + ", ".join(held),
            )  # fmt: skip
    for name, tensor in held.items():
        if name not in project.inputs:
            raise ProjectError(
                f"the file needs '{name}', and the project has no such input", where=f"key 'inputs'; {project.model}",
                todo=f"add '{name}' with its shape and dtype to 'inputs'",
            )  # fmt: skip
        given = project.inputs[name]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        if dtype != given.dtype:
            raise ProjectError(
                f"'{name}' is {dtype} in the file and {given.dtype} in the project",
                where=f"key 'inputs.{name}.dtype'", todo=f"write {dtype}",
            )  # fmt: skip
        if tensor.HasField("shape"):
            _check_shape(name, given.shape, tensor.shape.dim)


def _check_shape(name: str, given: tuple[int | str, ...], dims: Any) -> None:
    fits = len(given) == len(dims) and all(
        not dim.HasField("dim_value") or dim.dim_value == size for size, dim in zip(given, dims, strict=True)
    )
    if not fits:
        held = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]
        raise ProjectError(
            f"'{name}' is {list(given)} in the project and {held} in the file, where a number is fixed",
            where=f"key 'inputs.{name}.shape'", todo="write the file's sizes, or export it with dynamic axes",
        )  # fmt: skip


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
