"""Programs made 16-bit and run in torch, as a file in onnxruntime, and as TorchScript; the bounds of the formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from edgeopt.backends import onnx_export, torchscript
from edgeopt.passes.half import HalfReport, half
from edgeopt.program import ExportedGraph, graph
from edgeopt.runtime.compare import output_errors
from edgeopt.spec.half_formats import FORMATS
from tests.passes.support import program

CAST = "aten.to.dtype"
TYPES = {"fp16": "float16", "bf16": "bfloat16"}
BOUND = {name: form.least_sqnr_db for name, form in FORMATS.items()}


class Rows(nn.Module):
    """`inner` between two linear layers: x [..., 32] -> [..., 32]."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inner, self.after = nn.Linear(32, 32), inner, nn.Linear(32, 32)

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def converted(
    module: nn.Module, *shapes, precision: str = "fp16", keep_fp32: tuple[str, ...] = (), dtype: str = "float32",
    inputs: dict[str, np.ndarray] | None = None,
) -> tuple[ExportedGraph, ExportedGraph, HalfReport]:  # fmt: skip
    """(fp32 program, its 16-bit program, the report); `inputs` are one batch of calibration data.

    No pass has run: each of them is free to take out what a test is about.
    """
    float32 = program(module, *shapes, dtype=dtype)
    result, report = half(float32, precision, keep_fp32=keep_fp32, batches=[inputs] if inputs else [])
    return float32, result, report


def in_onnxruntime(given: ExportedGraph, folder: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of the written file, which has been proved equal to the program before it is run here."""
    file = onnx_export.write(given, folder, opset_max=20)
    session = onnxruntime.InferenceSession(str(folder / file.name), providers=["CPUExecutionProvider"])
    names = list(given.signature.output_names)
    return dict(zip(names, session.run(names, inputs), strict=True))


def in_torchscript(given: ExportedGraph, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    script = torchscript.frozen(given)
    with torch.no_grad():
        return graph.to_arrays(given.signature, script(*graph.to_tensors(given.signature, inputs)))


def sqnr_db(wanted: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> float:
    return min(error.sqnr_db for error in output_errors([wanted], [found]).values())


def types_of(given: ExportedGraph) -> dict[str, set[str]]:
    """Operator name -> the types of what its nodes give, casts left out."""
    found: dict[str, set[str]] = {}
    for node in given.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and str(node.target) != CAST:
            name = str(node.target).removeprefix("aten.").split(".")[0]
            found.setdefault(name, set()).add(str(value.dtype).removeprefix("torch."))
    return found


def casts_of_casts(given: ExportedGraph) -> list[str]:
    """Casts that read a cast: a value that was rounded for nothing."""
    casts = [node for node in given.module.graph.nodes if str(node.target) == CAST]
    return [node.name for node in casts if node.args[0] in casts]


def stored_types(path: Path) -> dict[str, int]:
    """Bytes of the weights of an ONNX file by their type."""
    found: dict[str, int] = {}
    for tensor in onnx.load(path).graph.initializer:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        found[name] = found.get(name, 0) + onnx.numpy_helper.to_array(tensor).nbytes
    return found
