"""A written ONNX file against the program that it was made from, in onnxruntime on this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from edgeopt.backends import equality
from edgeopt.backends.backend import precision_of
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import OnnxGraph, Program
from edgeopt.program.onnx_session import open_session


def compare(program: Program, path: Path) -> None:
    """LoweringError, naming output and sizes, where the file does not compute what the program does.

    An integer program is compared without the runtime's graph optimizations: what the fused integer kernels of
    this machine's CPU round or saturate says nothing about the file, and is judged by the gates and on the device.
    """
    session = _session(str(path), program, path.name)
    original = None
    if isinstance(program, OnnxGraph):
        original = _session(program.model.SerializeToString(), program, "the model given")
    within = equality.tolerance(program)
    for case in equality.cases(program):
        if original is None:
            expected = equality.expected(program, case.inputs)
        else:
            expected = _run(original, case.inputs, program.signature.output_names, "the model given")
        found = _run(session, case.inputs, program.signature.output_names, path.name)
        chosen = dict(program.signature.decisions)
        equality.require(expected, found, within, words=case.words, file=path.name, decisions=chosen)


def require_integer_weights(path: Path) -> None:
    """LoweringError where a weight is stored as float and quantized when the file runs: four times its size."""
    model = onnx.load(path, load_external_data=False)
    stored = {t.name for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in stored:
            raise LoweringError(f"the quantized weight '{node.input[0]}' is stored as float", where=path.name)


def _session(model: str | bytes, program: Program, name: str) -> onnxruntime.InferenceSession:
    try:
        return open_session(model, program.custom_ops, as_written=precision_of(program) == "int8")
    except Exception as why:  # onnxruntime's exceptions share no base of their own
        raise LoweringError(f"onnxruntime cannot load the file: {first_line(why)}", where=name) from why


def _run(
    session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray], outputs: tuple[str, ...], name: str
) -> dict[str, np.ndarray]:
    try:
        return dict(zip(outputs, session.run(list(outputs), inputs), strict=True))
    except Exception as why:
        shapes = ", ".join(f"{k}{list(v.shape)}" for k, v in inputs.items())
        raise LoweringError(f"onnxruntime cannot run the file for {shapes}: {first_line(why)}", where=name) from why
