"""Small programs and settings for the tests of quant/, and what onnxruntime makes of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

from edgeopt.backends import integer_kernels, onnx_export
from edgeopt.program import ExportedGraph, Signature, graph
from edgeopt.program.qdq import is_quantize
from edgeopt.quant import convert, pt2e
from edgeopt.quant.prepare import prepare
from edgeopt.quant.report import QuantReport
from edgeopt.spec.manifest import Axis, TensorSpec
from edgeopt.spec.profile import ResolvedQuantization

BATCH = Axis(min=1, opt=2, max=64)


def quantization(placement: str = "onnxruntime-x86", **changed) -> ResolvedQuantization:
    """The quantization of the shipped profile for a placement."""
    tensorrt = placement == "tensorrt"
    settings = {
        "placement": placement,
        "activations": "int8-symmetric" if tensorrt else "uint8-asymmetric",
        "weight_bits": 7 if placement == "onnxruntime-x86" else 8,
        "per_channel": True,
        "ranges": "minmax",
    }
    return ResolvedQuantization(**{**settings, **changed})


class _Flat(torch.nn.Module):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor):
        return (self.model(x),)


def program(
    model: torch.nn.Module, *sizes: int, dtype: str = "float32", values=(-1.0, 1.0), varying: int | None = None
) -> ExportedGraph:
    """A model of one input `x`, [batch, *sizes], and one tensor output `y`, with a dynamic batch.

    `varying`: the dimension whose size varies as well, from 4 to 64.
    """
    example = torch.zeros(2, *sizes, dtype=getattr(torch, dtype))
    shape, axes = ["batch", *sizes], {"batch": BATCH}
    if varying:
        shape[varying] = "size"
        axes["size"] = Axis(min=4, opt=sizes[varying - 1], max=64)
    dims = {i: torch.export.Dim(n, min=axes[n].min, max=axes[n].max) for i, n in enumerate(shape) if n in axes}
    with torch.no_grad():
        out = model.eval()(example)
        exported = torch.export.export(_Flat(model), (example,), dynamic_shapes=(dims,), strict=False)
    signature = Signature(
        inputs=(TensorSpec(name="x", dtype=dtype, shape=tuple(shape)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", *out.shape[1:])),),
        axes=axes,
        output_structure={"kind": "tensor", "index": 0},
        values={"x": values},
    )
    return ExportedGraph(signature=signature, reference=(), module=exported.module(check_guards=False))


def batches(*sizes: int, count: int = 4, size: int = 8, seed: int = 0, scale: float = 1.0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{"x": (scale * rng.standard_normal((size, *sizes))).astype(np.float32)} for _ in range(count)]


def outputs(p: ExportedGraph, x: np.ndarray) -> np.ndarray:
    return graph.run(p, {"x": x})["y"]


def sqnr_db(reference: np.ndarray, value: np.ndarray) -> float:
    reference, value = reference.astype(np.float64), value.astype(np.float64)
    return 10 * np.log10((reference**2).sum() / ((reference - value) ** 2).sum())


def watched(p: ExportedGraph, settings: ResolvedQuantization, data: list[dict]) -> tuple[ExportedGraph, QuantReport]:
    """The way of QAT without a step: fake-quantizers that have seen the data, their state replayed and converted."""
    prepared = prepare(p, settings, qat=True)
    fakes = [m for m in prepared.module.modules() if isinstance(m, pt2e.FakeQuantizeBase)]
    for fake in fakes:
        fake.train()
    for batch in data:
        prepared.module(torch.from_numpy(batch["x"]))
    return convert.from_state(p, settings, prepared.module.state_dict())


def in_onnxruntime(p: ExportedGraph, folder: Path) -> tuple[onnxruntime.InferenceSession, Counter]:
    """A session of the lowered program, and the operators that onnxruntime really runs, read from its own graph."""
    file = onnx_export.write(p, folder, opset_max=18)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(folder / file.name), options, providers=["CPUExecutionProvider"],
        disabled_optimizers=list(integer_kernels.DISABLED_FOR_INT8),
    )  # fmt: skip
    model = onnx.load(folder / "optimized.onnx")
    return session, Counter(node.op_type for node in model.graph.node)


def kernels_of(p: ExportedGraph, folder: Path) -> integer_kernels.Kernels:
    """What onnxruntime runs of the lowered program."""
    folder.mkdir(exist_ok=True)
    return integer_kernels.kernels(folder / onnx_export.write(p, folder, opset_max=18).name)


def quantize_count(p: ExportedGraph) -> int:
    """The quantize operators of the graph."""
    return sum(is_quantize(node) for node in p.module.graph.nodes)


def names(p: ExportedGraph) -> list[str]:
    """The operators of the graph in order, without overloads: what stands where."""
    called = [n.target for n in p.module.graph.nodes if n.op == "call_function"]
    return [str(t).split(".")[1] if isinstance(t, torch._ops.OpOverload) else t.__name__ for t in called]
