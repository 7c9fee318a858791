"""A program as `predict`: named numpy arrays in, named numpy arrays out, in this process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeopt.errors import DataError
from edgeopt.onboard.predictor import check_inputs
from edgeopt.onboard.structure import flat_inputs
from edgeopt.program import ExportedGraph, OnnxGraph, Program, ScriptGraph, Signature

Predict = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def predictor(program: Program) -> Predict:
    """`predict(inputs) -> outputs` of the program; inputs that fit no declared axis are a DataError."""
    run = _runner(program)
    signature = program.signature
    return lambda inputs: run(checked(inputs, signature))


def checked(inputs: dict[str, np.ndarray], signature: Signature) -> dict[str, np.ndarray]:
    """The inputs in the signature's order, contiguous; DataError for a wrong name, dtype or size.

    It is the check that the runner on the device makes.
    """
    specs = [spec.model_dump() for spec in signature.inputs]
    axes = {name: axis.model_dump() for name, axis in signature.axes.items()}
    try:
        flat = flat_inputs(signature.input_structure, signature.input_names, inputs)
        arrays = check_inputs(flat, specs, axes)
    except ValueError as why:
        raise DataError(
            f"'predict' was called with inputs that do not fit: {why}", where="key 'evaluate'",
            todo="give other sizes, or widen the axis in the project",
        ) from None  # fmt: skip
    return dict(zip(signature.input_names, arrays, strict=True))


def _runner(program: Program) -> Predict:
    if isinstance(program, ExportedGraph):
        from edgeopt.program.graph import run

        return lambda inputs: run(program, inputs)
    if isinstance(program, ScriptGraph):
        from edgeopt.program.graph import run_script

        return lambda inputs: run_script(program, inputs)
    return _onnx_runner(program)


def _onnx_runner(program: OnnxGraph) -> Predict:
    from edgeopt.program.onnx_session import open_session

    session = open_session(program.model.SerializeToString(), program.custom_ops, as_written=True)
    names = list(program.signature.output_names)
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
