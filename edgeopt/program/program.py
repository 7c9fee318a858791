"""The tagged union that flows: ExportedGraph, ScriptGraph or OnnxGraph. A stage never mutates the one it was given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgeopt.program.custom_ops import NONE, CustomOps
from edgeopt.spec.half_formats import HalfPrecision
from edgeopt.spec.manifest import Axis, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import torch


@dataclass(frozen=True)
class Signature:
    """Names, dtypes and shapes of a program's flat inputs and outputs.

    `inputs` and `outputs` are in calling order; a shape's strings are names of `axes`, or of output axes that only
    the program knows (`dim_0` ...). `output_structure` is the user's structure around the outputs as JSON data
    (see runtime/structure). `values` gives the range (lowest, highest) that synthetic inputs are drawn from.
    `input_structure` is the structure of forward's arguments around the inputs, None where each is one of its own.
    `decisions`: outputs that choose classes, which are compared by how many agree, each with the axis along which
    their order does not count, or None.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, Axis]
    output_structure: Any
    values: dict[str, tuple[float, float]]
    input_structure: Any = None
    decisions: tuple[tuple[str, int | None], ...] = ()

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)


@dataclass(frozen=True)
class Call:
    """One call of the unoptimised model in eval mode: named inputs and the named outputs that it gave."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class _Captured:
    signature: Signature
    reference: tuple[Call, ...]
    stages: tuple[str, ...] = ("capture",)
    notes: tuple[str, ...] = ()  # what the user should know: how it was captured, what was declined and why
    custom_ops: CustomOps = NONE  # the user's own operators, which its graph may hold

    def after(self, stage: str, *, notes: tuple[str, ...] = (), **changed: Any):
        """A copy with `changed` fields, `stage` appended to the stages and `notes` to the notes."""
        return dataclasses.replace(self, stages=(*self.stages, stage), notes=(*self.notes, *notes), **changed)


@dataclass(frozen=True)
class ExportedGraph(_Captured):
    """An FX graph of aten operators in inference form.

    `module` takes the inputs as positional tensors in the order of `signature.inputs` and returns a flat tuple of
    tensors in the order of `signature.outputs`; its weights are its parameters and buffers. `integer` is true once
    the graph holds quantize and dequantize operators, `half` names the 16-bit type where it computes in one. Treat it
    as frozen: passes work on a copy.
    """

    module: torch.fx.GraphModule = None  # type: ignore[assignment]
    integer: bool = False
    half: HalfPrecision | None = None
    qat_state: dict[str, torch.Tensor] | None = None  # what QAT learned: the fake-quantized graph's state_dict
    # kept by graph.export, since the stage cache and the writers of files all take it; a changed copy starts anew
    exported: list[torch.export.ExportedProgram] = field(default_factory=list, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class ScriptGraph(_Captured):
    """A frozen TorchScript module of positional tensors to a flat tuple; `how` is 'trace', 'script' or 'file'."""

    module: torch.jit.ScriptModule = None  # type: ignore[assignment]
    how: str = "trace"


@dataclass(frozen=True)
class OnnxGraph(_Captured):
    """An ONNX model as the user gave it; `integer` where it holds Q/DQ or integer operators already."""

    model: onnx.ModelProto = None  # type: ignore[assignment]
    integer: bool = False


Program = ExportedGraph | ScriptGraph | OnnxGraph
