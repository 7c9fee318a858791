"""Which kernels onnxruntime really runs for an ONNX file, read from its own optimized graph.

A file with Q/DQ says what may run on integers; whether onnxruntime's optimizer fuses a Q/DQ group into an integer
kernel depends on the group's form and on the version. What it could not fuse runs in float between a
DequantizeLinear and a QuantizeLinear, and is slower than the float model.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime

from edgeopt.errors import LoweringError, first_line
from edgeopt.program.custom_ops import NONE, CustomOps
from edgeopt.program.onnx_session import open_session

# The integer kernels of the CPU provider (onnxruntime, docs/OperatorKernels.md): those of the default domain that
# multiply integers, and the contributed QLinear... and Q... families.
INTEGER_PRODUCTS = {
    "ConvInteger", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulInteger", "MatMulInteger16",
    "MatMulIntegerToFloat", "QAttention", "QGemm", "QLinearConv", "QLinearConvTranspose", "QLinearMatMul",
    "QMoE", "QOrderedMatMul",
}  # fmt: skip
FLOAT_PRODUCTS = {
    "Attention", "Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "GRU", "Gemm", "LSTM", "MatMul",
    "MultiHeadAttention", "NhwcFusedConv", "RNN", "TransposeMatMul",
}  # fmt: skip
# WeightBiasQuantization (seen in 1.32) makes int8 of every Conv, ConvTranspose and Gemm that is left float behind a
# DequantizeLinear, with one scale for its whole weight: layers are left float because int8 loses them.
DISABLED_FOR_INT8 = ("WeightBiasQuantization",)
_QUANTIZE = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_INTEGER_TYPES = {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
# Operators that move values, or choose among them, and so run on whatever type they are given.
_MOVE = {
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "MaxPool", "NhwcMaxPool",
    "Pad", "ReduceMax", "ReduceMin", "ReorderInput", "ReorderOutput", "Reshape", "Resize", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
}  # fmt: skip
# What computes sizes and indices and never the values of the model.
_ABOUT_SIZES = {"Cast", "Constant", "ConstantOfShape", "Range", "Shape", "Size", "EyeLike"}


@dataclass(frozen=True)
class Boundary:
    """Float operators between integers: what each costs is a dequantize, a quantize, and a float kernel."""

    operators: tuple[str, ...]  # their types, in graph order
    names: tuple[str, ...]  # of the nodes; of their outputs where a node has no name

    def __str__(self) -> str:
        return f"{' -> '.join(self.operators)} ({self.names[-1]})"


@dataclass(frozen=True)
class Kernels:
    """Operator -> how many of onnxruntime's optimized graph run on integers, and how many in float.

    `integer`: kernels that read 8-bit integers, those that only move them included; `floats`: all that compute in
    float; `quantizes`: QuantizeLinear and DequantizeLinear that are left. `boundaries`: the float operators that stand
    between integers on both sides.
    """

    integer: dict[str, int]
    floats: dict[str, int]
    quantizes: dict[str, int]
    boundaries: tuple[Boundary, ...] = ()

    @property
    def integer_products(self) -> int:
        """Convolutions and matrix products on integers."""
        return sum(count for op, count in self.integer.items() if op in INTEGER_PRODUCTS)

    @property
    def float_products(self) -> int:
        """Convolutions and matrix products in float."""
        return sum(count for op, count in self.floats.items() if op in FLOAT_PRODUCTS)

    @property
    def integer_count(self) -> int:
        """Kernels that compute on integers; those that only move values do not count."""
        return sum(count for op, count in self.integer.items() if op not in _MOVE)


def kernels(file: Path, custom_ops: CustomOps = NONE) -> Kernels:
    """The kernels that onnxruntime runs on this machine's CPU for the ONNX file. LoweringError where it cannot load it.

    The graph is optimized for this machine: another CPU may take other float kernels, the integer ones are the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(optimized)
        options.intra_op_num_threads = 1  # nothing is run
        try:
            open_session(file, custom_ops, disabled=DISABLED_FOR_INT8, options=options)
        except Exception as why:  # onnxruntime's exceptions share no base of their own
            raise LoweringError(f"onnxruntime cannot load the file: {first_line(why)}", where=file.name) from why
        return of_optimized(onnx.load(optimized, load_external_data=False))


def of_optimized(model: onnx.ModelProto) -> Kernels:
    """The kernels of a graph as onnxruntime optimized it; subgraphs of If and Loop are left out."""
    nodes = list(model.graph.node)
    integers = _integer_values(model.graph, nodes)
    groups = {"integer": Counter(), "floats": Counter(), "quantizes": Counter()}
    floats = []
    for node in nodes:
        kind = _kind(node, integers)
        if kind:
            groups[kind][node.op_type] += 1
        if kind == "floats":
            floats.append(node)
    boundaries = _boundaries(nodes, floats, integers)
    return Kernels(*(dict(sorted(groups[k].items())) for k in groups), boundaries)


def _kind(node: onnx.NodeProto, integers: set[str]) -> str | None:
    if node.op_type in _QUANTIZE:
        return "quantizes"
    if node.op_type in INTEGER_PRODUCTS or any(name in integers for name in node.input):
        return "integer"
    return None if node.op_type in _ABOUT_SIZES else "floats"


def _integer_values(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> set[str]:
    """The names of 8-bit values: weights, inputs, what is quantized, and what integer kernels give."""
    found = {t.name for t in graph.initializer if t.data_type in _INTEGER_TYPES}
    zero_points = {name for node in nodes if node.op_type in _QUANTIZE for name in node.input[2:3]}
    found = (found - zero_points) | {
        v.name for v in graph.input if v.type.tensor_type.elem_type in _INTEGER_TYPES
    }  # fmt: skip
    for node in nodes:  # in topological order
        if _gives_integers(node, found):
            found.update(node.output if node.op_type != "DynamicQuantizeLinear" else node.output[:1])
    return found


def _gives_integers(node: onnx.NodeProto, integers: set[str]) -> bool:
    if node.op_type in _MOVE:
        return bool(node.input) and node.input[0] in integers
    with_output_scale = node.op_type == "QGemm" and len(node.input) > 7 and bool(node.input[7])
    return with_output_scale or node.op_type.startswith("QLinear") or node.op_type in _QUANTIZE[::2]


def _boundaries(nodes: list[onnx.NodeProto], floats: list[onnx.NodeProto], integers: set[str]) -> tuple[Boundary, ...]:
    """Chains of float operators that a dequantize feeds and a quantize ends, in graph order."""
    maker = {name: node for node in nodes for name in node.output}
    float_outputs = {name for node in floats for name in node.output}
    found = []
    for node in nodes:
        if node.op_type != "QuantizeLinear" or node.input[0] not in float_outputs:
            continue
        chain = [maker[node.input[0]]]
        while before := next((maker[n] for n in chain[-1].input if n in float_outputs), None):
            chain.append(before)
        first = chain[-1]
        if any(name in maker and _gives_float_of_integers(maker[name]) for name in first.input):
            chain.reverse()
            found.append(Boundary(tuple(n.op_type for n in chain), tuple(n.name or n.output[0] for n in chain)))
    return tuple(found)


def _gives_float_of_integers(node: onnx.NodeProto) -> bool:
    return node.op_type == "DequantizeLinear" or node.op_type in INTEGER_PRODUCTS
