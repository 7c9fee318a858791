"""An integer file in the form that quantizes by itself: no Q/DQ, and a scale for each tensor in a calibration file.

The DLA takes no explicit Q/DQ (TensorRT Developer Guide, "Running on DLA"), but the scales of a calibrator, which
TensorRT 8 to 10 read from a file. Ours are those of the Q/DQ pairs: what our observers found, so that the DLA rounds
where the judged file rounds. Between pairs a scale follows from its neighbours where an operator keeps the range.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from edgeopt.backends import onnx_file
from edgeopt.errors import LoweringError
from edgeopt.spec.jetpack import version_tuple

FILE, CALIBRATION = "int8_dla.onnx", "int8_dla.calib"

# what comes out lies within the range of what goes in
_KEEPS = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Slice", "Split", "Relu",
          "Clip", "LeakyRelu", "AveragePool", "GlobalAveragePool", "ReduceMean", "Gather", "Dropout")  # fmt: skip
# what goes in may be clipped to the range of what comes out, since nothing else is seen of it
_SEEN_THROUGH = ("Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity",
                 "Dropout")  # fmt: skip


@dataclass(frozen=True)
class Implicit:
    """What was written: file names, the scales by tensor, and the float tensors that have none and stay fp16."""

    files: tuple[str, ...]
    scales: dict[str, float]
    without: tuple[str, ...]


def write(quantized: Path, out: Path, *, tensorrt: str) -> Implicit:
    """Write FILE and CALIBRATION into `out` from the Q/DQ file `quantized`, for TensorRT `tensorrt`.

    LoweringError where a pair is not symmetric or has a scale for each channel of an activation, which the format
    cannot say.
    """
    model = onnx.load(quantized)
    scales = _without_pairs(model.graph)
    _propagate(model.graph, scales)
    onnx_file.save(model, out / FILE)
    (out / CALIBRATION).write_text(calibration(scales, tensorrt))
    written = onnx_file.read_back(out / FILE)
    return Implicit((*written.files, CALIBRATION), scales, _lacking(out / FILE, scales))


def calibration(scales: dict[str, float], tensorrt: str) -> str:
    """The text of a calibration file: 'TRT-8502-EntropyCalibration2', then 'tensor: scale' as float32's bits in hex.

    The form that TensorRT's entropy calibrator 2 writes, which the DLA requires (EntropyCalibrator.h in its samples).
    """
    lines = [f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in sorted(scales.items())]
    return "\n".join([f"TRT-{_number(tensorrt)}-EntropyCalibration2", *lines]) + "\n"


def _number(tensorrt: str) -> int:
    """8.5.2 -> 8502, 10.3 -> 100300 (NvInferVersion.h)."""
    major, minor, patch = (*version_tuple(tensorrt), 0, 0)[:3]
    return major * 10000 + minor * 100 + patch if major >= 10 else major * 1000 + minor * 100 + patch


def _without_pairs(graph: GraphProto) -> dict[str, float]:
    """Take every pair out of the graph; the scale of each tensor that was rounded, the largest of several."""
    stored = _stored(graph)
    source: dict[str, str] = {}  # integers, and floats after a pair -> the tensor that was rounded
    scales: dict[str, float] = {}
    kept, floats = [], []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            rounded = source.get(node.input[0], node.input[0])
            source[node.output[0]] = rounded
            if rounded not in stored:
                scales[rounded] = max(scales.get(rounded, 0.0), _scale(node, stored))
        elif node.op_type == "DequantizeLinear" and node.input[0] in stored:
            floats.append(numpy_helper.from_array(_dequantized(node, stored), node.output[0]))
        elif node.op_type == "DequantizeLinear":
            if node.input[0] not in source:
                raise LoweringError(f"'{node.input[0]}' is made of integers, which implicit scales cannot say")
            source[node.output[0]] = source[node.input[0]]
        else:
            kept.append(node)
    for node in kept:
        for position, name in enumerate(node.input):
            node.input[position] = source.get(name, name)
    graph.initializer.extend(floats)
    _keep_output_names(graph, kept, source, scales)
    del graph.node[:]
    graph.node.extend(kept)
    _drop_unread(graph)
    return scales


def _stored(graph: GraphProto) -> dict[str, TensorProto]:
    """The tensors that the graph holds, as initializers or as Constant nodes."""
    constants = [node for node in graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]
    return {t.name: t for t in graph.initializer} | {node.output[0]: node.attribute[0].t for node in constants}


def _scale(node: NodeProto, stored: dict[str, TensorProto]) -> float:
    if any(name not in stored for name in filter(None, node.input[1:])):
        raise LoweringError(f"the scale of '{node.input[0]}' is found at run time, which a calibration file cannot say")
    scale = numpy_helper.to_array(stored[node.input[1]])
    zero = numpy_helper.to_array(stored[node.input[2]]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
    if scale.size != 1 or np.any(zero):
        raise LoweringError(
            f"'{node.input[0]}' is not quantized by one symmetric scale, which is all that a calibration file holds",
            todo="quantization: {activations: int8-symmetric}",
        )
    return float(scale.reshape(()))


def _dequantized(node: NodeProto, stored: dict[str, TensorProto]) -> np.ndarray:
    """A stored weight or bias as float32."""
    integers, scale = (numpy_helper.to_array(stored[name]) for name in node.input[:2])
    zero = numpy_helper.to_array(stored[node.input[2]]) if len(node.input) > 2 and node.input[2] else 0
    if scale.size > 1:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        shape = [-1 if i == axis else 1 for i in range(integers.ndim)]
        scale, zero = scale.reshape(shape), np.reshape(zero, shape) if np.size(zero) > 1 else zero
    return ((integers.astype(np.float32) - np.asarray(zero, np.float32)) * scale).astype(np.float32)


def _keep_output_names(graph: GraphProto, nodes: list[NodeProto], source: dict[str, str], scales: dict) -> None:
    """An output that came out of a pair is made by an Identity under its name."""
    for value in graph.output:
        if value.name in source:
            nodes.append(onnx.helper.make_node("Identity", [source[value.name]], [value.name]))
            scales[value.name] = scales[source[value.name]]


def _drop_unread(graph: GraphProto) -> None:
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    held = [t for t in graph.initializer if t.name in read]
    nodes = [node for node in graph.node if node.op_type != "Constant" or node.output[0] in read]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(held)
    graph.node.extend(nodes)


def _propagate(graph: GraphProto, scales: dict[str, float]) -> None:
    """Give tensors between pairs the scale that follows from a neighbour's, until nothing more follows."""
    stored = {t.name for t in graph.initializer}
    changed = True
    while changed:
        before = len(scales)
        for node in graph.node:
            given, made = node.input[0] if node.input else "", [o for o in node.output if o]
            if node.op_type == "Concat":
                _through_concat(node, scales)
            if node.op_type in _KEEPS and given in scales:
                for name in made:
                    scales.setdefault(name, scales[given])
        for node in reversed(graph.node):
            if node.op_type in _SEEN_THROUGH and node.output[0] in scales and node.input[0] not in stored:
                scales.setdefault(node.input[0], scales[node.output[0]])
        changed = len(scales) > before


def _through_concat(node: NodeProto, scales: dict[str, float]) -> None:
    known = [scales[name] for name in node.input if name in scales]
    if len(known) == len(node.input):
        scales.setdefault(node.output[0], max(known))


def _lacking(path: Path, scales: dict[str, float]) -> tuple[str, ...]:
    """The float tensors of the file that have no scale."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False)).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    floats = [name for name, kind in types.items() if kind == TensorProto.FLOAT]
    stored = _stored(graph)
    return tuple(sorted(name for name in floats if name not in scales and name not in stored))
