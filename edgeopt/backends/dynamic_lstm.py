"""LSTMs of a written integer file with int8 weights and scales found at run time, as onnxruntime has a kernel for.

A recurrent layer's state cannot have a range that calibration fixes without losing what it gathers over time, so it
is no place for Q/DQ. onnxruntime's DynamicQuantizeLSTM (domain com.microsoft, CPU) keeps weights in int8 and finds
the scales of input and state at each step; there is none for GRU and RNN. Small layers may get slower by it (measured
here: hidden size 64 1.2 times slower, 256 1.9 times faster), so the file is a candidate of its own.

Inputs and layouts are those of the operator's schema (onnxruntime, docs/ContribOperators.md, DynamicQuantizeLSTM).
onnxruntime's own quantize_dynamic would write the node too, but takes every Gemm of the file apart, and with it the
integer kernels around.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from edgeopt.backends import integer_kernels
from edgeopt.backends.opset_rewrites import drop_unused, nodes_of
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import Program
from edgeopt.program.onnx_session import open_session

FILE_NAME = "int8_dynamic.onnx"
DOMAIN = "com.microsoft"
LEAST_SQNR_DB = 20.0  # against the file that it was made of; the gates judge it against the model


def lstms(path: Path) -> int:
    """How many LSTMs of the file, not counting those in bodies, have weights that depend on nothing else."""
    graph = onnx.load(path).graph
    return sum(_constant(graph, node) is not None for node in graph.node if node.op_type == "LSTM")


def write(program: Program, path: Path, *, per_channel: bool, weight_bits: int) -> Path:
    """Write FILE_NAME beside the integer file `path`. LoweringError, and no file, where it is not right.

    `weight_bits` 7 keeps the sums of products of pairs within int16, for x86 without VNNI.
    """
    out = path.with_name(FILE_NAME)
    try:
        model = _with_stored_weights(onnx.load(path))
        for i, node in enumerate(model.graph.node):
            if node.op_type == "LSTM" and _constant(model.graph, node) == []:
                model.graph.node[i].CopyFrom(_dynamic(model.graph, node, per_channel, 2 ** (weight_bits - 1) - 1))
        drop_unused(model.graph)
        if not any(o.domain == DOMAIN for o in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
        out.write_bytes(model.SerializeToString(deterministic=True))
        _prove(program, path, out)
    except Exception as why:  # what onnx and the runtime raise has no base of its own
        out.unlink(missing_ok=True)
        if isinstance(why, LoweringError):
            raise
        raise LoweringError(f"onnxruntime cannot quantize the LSTM: {first_line(why)}", where=FILE_NAME) from why
    return out


def _dynamic(graph: onnx.GraphProto, lstm: onnx.NodeProto, per_channel: bool, most: int) -> onnx.NodeProto:
    """The node in place of `lstm`, whose weights in integers of at most `most` are added to the graph.

    ONNX keeps weights as [directions, 4 * hidden, inputs], this operator as [directions, inputs, 4 * hidden]; scales
    are [directions, 4 * hidden] by channel, else [directions].
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    inputs = [*lstm.input, *[""] * (8 - len(lstm.input))]
    for i in (1, 2):
        weight = onnx.numpy_helper.to_array(stored[inputs[i]])
        scale = np.abs(weight).max(2 if per_channel else (1, 2)) / np.float32(most)
        scale = np.maximum(scale, np.float32(2.0**-20)).astype(np.float32)
        codes = np.rint(weight / scale.reshape(*scale.shape, *[1] * (3 - scale.ndim))).clip(-most, most).astype(np.int8)
        added = {
            f"{inputs[i]}_int8": codes.transpose(0, 2, 1),
            f"{inputs[i]}_scale": scale,
            f"{inputs[i]}_zero_point": np.zeros(scale.shape, np.int8),
        }
        inputs[i], *parameters = added
        inputs += parameters
        for name, value in added.items():
            if name not in stored:  # two LSTMs may share weights
                graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(value), name))
    made = onnx.helper.make_node("DynamicQuantizeLSTM", inputs, lstm.output, lstm.name, domain=DOMAIN)
    made.attribute.extend(a for a in lstm.attribute if a.name != "layout")
    return made


def _constant(graph: onnx.GraphProto, lstm: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """The nodes that make the weights of `lstm` of stored tensors, in graph order; None where more goes into them."""
    if any(a.name == "layout" and a.i for a in lstm.attribute):
        return None  # batch first, which the kernel has not
    stored = {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    needed, names = set(), list(lstm.input[1:3])
    while names:
        name = names.pop()
        if name in stored or not name:
            continue
        if name not in makers:
            return None  # an input of the file
        if makers[name].output[0] not in needed:
            needed.add(makers[name].output[0])
            names += makers[name].input
    return [node for node in graph.node if node.output[0] in needed]


def _with_stored_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each LSTM's weights as stored tensors: exporters reorder the gates where the file runs."""
    graph = model.graph
    for lstm in [node for node in graph.node if node.op_type == "LSTM"]:
        nodes = _constant(graph, lstm)
        if not nodes:
            continue
        made = [name for name in lstm.input[1:3] if any(name in node.output for node in nodes)]
        outputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in made]
        alone = onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "weights", [], outputs, list(graph.initializer)),
            opset_imports=list(model.opset_import), ir_version=model.ir_version,
        )  # fmt: skip
        session = open_session(alone.SerializeToString())
        for name, value in zip(made, session.run(made, {}), strict=True):
            graph.initializer.append(onnx.numpy_helper.from_array(value, f"{name}_stored"))
            at = list(lstm.input).index(name)
            lstm.input[at] = f"{name}_stored"
    _drop_unread(graph)
    return model


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Take out nodes that nothing reads, and then the stored tensors that only they read."""
    while True:
        read = {value.name for value in graph.output} | {name for node in nodes_of(graph) for name in node.input}
        idle = [node for node in graph.node if not read.intersection(node.output)]
        if not idle:
            break
        for node in idle:
            graph.node.remove(node)
    drop_unused(graph)


def _prove(program: Program, given: Path, made: Path) -> None:
    sessions = [
        open_session(path, program.custom_ops, disabled=integer_kernels.DISABLED_FOR_INT8) for path in (given, made)
    ]
    names = list(program.signature.output_names)
    for call in program.reference:
        exact, found = (session.run(names, call.inputs) for session in sessions)
        for name, a, b in zip(names, exact, found, strict=True):
            a, b = a.astype(np.float64), b.astype(np.float64)
            noise, signal = float(np.square(a - b).sum()), float(np.square(a).sum())
            if not noise * 10 ** (LEAST_SQNR_DB / 10) <= signal:
                raise LoweringError(
                    f"int8 weights of the LSTM move '{name}' by more than {LEAST_SQNR_DB:.0f} dB allow", where=made.name
                )
