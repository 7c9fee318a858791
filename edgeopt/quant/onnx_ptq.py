"""Post-training quantization of an ONNX file that has no PyTorch source, by onnxruntime's own quantizer.

onnxruntime prepares the graph (BatchNorm folded, shapes inferred) and writes the pairs; which nodes, and over which
ranges, is decided here as for any other program: the placement's rules, the profile's calibration method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from edgeopt.errors import DeclinedError, first_line
from edgeopt.program import OnnxGraph, Signature
from edgeopt.program import batches as _batches
from edgeopt.program.data import empty
from edgeopt.program.onnx_session import open_session
from edgeopt.program.onnx_walk import name_axes
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import findings, off_centre, onnx_placement
from edgeopt.quant.prepare import in_words
from edgeopt.quant.report import QuantReport, report_of
from edgeopt.quant.scheme import scheme_for
from edgeopt.spec.profile import ResolvedQuantization

LIMIT_BYTES = 2_000_000_000  # onnxruntime's preparation passes the model as one protobuf message
OPSET = 13  # the first whose DequantizeLinear has an axis, which one scale a channel needs
SAME = 1e-3  # of the largest output: how far a converted or prepared file may be from the one given


def refusal(model: onnx.ModelProto) -> str | None:
    """Why the file cannot be quantized at all, known without running it; None where it may be tried."""
    size = sum(_size_bytes(tensor) for tensor in model.graph.initializer)
    if size > LIMIT_BYTES:
        return f"the file holds {size / 1e9:.1f} GB of weights, and onnxruntime's quantizer takes less than 2 GB"
    if not any(node.op_type in ("Conv", "Gemm", "MatMul") for node in model.graph.node):
        inside = [node.op_type for node in model.graph.node if node.op_type in ("If", "Loop", "Scan")]
        if inside:
            return f"all of its layers lie in the bodies of {', '.join(sorted(set(inside)))}, which stay float"
        if not model.functions:
            return "it has no convolution and no matrix product"
    return None


def quantize(
    program: OnnxGraph,
    quantization: ResolvedQuantization,
    batches: Iterable[Any],
    *,
    limit: int = 32,
    keep_float: tuple[str, ...] = (),
    progress: Progress = SILENT,
) -> tuple[OnnxGraph, QuantReport]:
    """The file with quantize and dequantize pairs, its weights as int8, and what was done.

    `batches`: {input name: array}; at most `limit` are run, one in memory at a time. `keep_float`: names of nodes, with
    * for any part, beginnings of their paths, and operators. DeclinedError where onnx or onnxruntime cannot prepare the
    file, or what they prepare gives other values; DataError for batches; ProjectError for a pattern of no node.
    """
    named = _named(program.model)
    onnx_placement.check_patterns(keep_float, named.graph)
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise empty("calibration")
    inputs = _arrays(first, program.signature, 1)
    model = _prepared(_at_opset(named, program), program, inputs)
    decisions, chosen = onnx_placement.decide(model.graph, quantization.placement, keep_float=keep_float, lost={})
    if not any(d.quantized for d in decisions):
        raise DeclinedError(
            "no node of the ONNX file can become an integer: "
            + "; ".join(dict.fromkeys(f"{d.operator}: {d.reason}" for d in decisions)),
            where="stage 'quantize'", todo="remove int8 from precision.allowed, or export the file anew",
        )  # fmt: skip
    observers = _calibrated(model, chosen, program, quantization, inputs, stream, limit, progress)
    lost = {name: why for name, o in observers.items() if (why := off_centre.lost(o))}
    decisions, chosen = onnx_placement.decide(model.graph, quantization.placement, keep_float=keep_float, lost=lost)
    quantized = _written(model, quantization, chosen, observers)
    report = report_of(in_words(quantization), decisions)
    warnings = _warnings(model, program.model, observers, lost)
    return program.after("quantize", model=quantized, integer=True), dataclasses.replace(report, warnings=warnings)


def _size_bytes(tensor: onnx.TensorProto) -> int:
    bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return math.prod(tensor.dims) * bits // 8


def _named(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes all have a name, each its own, with functions of the file's own written out."""
    copy = onnx.inliner.inline_local_functions(model) if model.functions else onnx.ModelProto.FromString(
        model.SerializeToString()
    )  # fmt: skip
    taken = {node.name for node in copy.graph.node}
    seen: set[str] = set()
    for number, node in enumerate(copy.graph.node):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type}_{number}"
            while node.name in taken:
                node.name += "_"
        seen.add(node.name)
    return copy


def _at_opset(model: onnx.ModelProto, program: OnnxGraph) -> onnx.ModelProto:
    """The model at an opset that has pairs of one scale a channel, without the sizes that it declares inside.

    Files of other people declare wrong sizes for values between inputs and outputs, which inference would believe.
    """
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    del model.graph.value_info[:]
    outputs = {spec.name: spec for spec in program.signature.outputs}
    for value in model.graph.output:
        kind, shape = value.type.tensor_type.elem_type, outputs[value.name].shape
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, shape))
    name_axes(model.graph, program.signature.inputs)  # so that inference tells them apart
    if opset >= OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(_with_weights_inside(model), OPSET)
    except Exception as why:  # the converter raises whatever its adapters raise
        raise DeclinedError(
            f"int8 needs opset {OPSET}, and onnx cannot convert the file from opset {opset}: {first_line(why)}",
            where="stage 'quantize'", todo=f"export it with opset {OPSET} or later",
        ) from why  # fmt: skip


def _with_weights_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """Files of IR 3 list weights among the inputs; the converter wants either all of them there or an IR above 3."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)
    return model


def _prepared(model: onnx.ModelProto, program: OnnxGraph, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """onnxruntime's preparation, checked against the file as given on one batch."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    names = list(program.signature.output_names)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        given_at, out = Path(folder) / "given.onnx", Path(folder) / "prepared.onnx"
        try:
            onnx.save(model, given_at)  # a model in memory would be changed by it
            # symbolic inference leaves files in the working directory where it fails; onnx's own tells types as well
            quant_pre_process(str(given_at), str(out), skip_symbolic_shape=True)
            prepared = _with_flat_biases(_named(onnx.load(out)))
            found = open_session(prepared.SerializeToString(), program.custom_ops).run(names, inputs)
        except Exception as why:  # neither onnxruntime's nor onnx's exceptions share a base
            raise DeclinedError(
                f"onnxruntime cannot prepare the file for quantization: {first_line(why)}", where="stage 'quantize'",
                todo="check the sizes that the file declares, or export it anew",
            ) from why  # fmt: skip
    given = open_session(program.model.SerializeToString(), program.custom_ops).run(names, inputs)
    for name, a, b in zip(names, given, found, strict=True):
        largest = float(np.abs(a.astype(np.float64)).max(initial=0.0))
        apart = float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) if a.shape == b.shape else math.inf
        if not apart <= SAME * max(largest, 1e-6):
            raise DeclinedError(
                f"prepared for quantization, the file gives other values: '{name}' is {apart:.2g} off",
                where="stage 'quantize'", todo=f"export the file with opset {OPSET} or later",
            )  # fmt: skip
    return prepared


def _with_flat_biases(model: onnx.ModelProto) -> onnx.ModelProto:
    """Biases of Gemm as [channels] where they are [1, channels], which is the same and what the quantizer takes."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    readers = [name for node in model.graph.node for name in node.input]
    for node in model.graph.node:
        bias = stored.get(node.input[2]) if node.op_type == "Gemm" and len(node.input) > 2 else None
        if bias is not None and len(bias.dims) == 2 and bias.dims[0] == 1 and readers.count(bias.name) == 1:
            del bias.dims[0]
    return model


def _calibrated(
    model: onnx.ModelProto, chosen: Sequence[str], program: OnnxGraph, quantization: ResolvedQuantization,
    first: dict[str, np.ndarray], rest: Iterator[Any], limit: int, progress: Progress,
) -> dict[str, torch.nn.Module]:  # fmt: skip
    """An observer a float value that the `chosen` nodes read or make, in graph order, after at most `limit` batches."""
    facts = onnx_placement.facts_of(model.graph)
    nodes = [n for n in model.graph.node if n.name in set(chosen)]
    names = dict.fromkeys(name for n in nodes for name in (*n.input, *n.output) if facts.is_activation(name))
    spec = scheme_for(quantization, qat=False).activation
    settings = {
        "dtype": spec.dtype, "qscheme": spec.qscheme, "quant_min": spec.quant_min, "quant_max": spec.quant_max
    }  # fmt: skip
    observers = {name: spec.observer_or_fake_quant_ctr(**settings) for name in names}
    session = open_session(_showing(model, list(names)).SerializeToString(), program.custom_ops)
    made = [name for name in names if name not in program.signature.input_names]
    seen = 0
    with progress.bar("calibrating", limit) as advance:
        inputs: dict[str, np.ndarray] | None = first
        while inputs is not None:
            seen += 1
            values = dict(zip(made, session.run(made, inputs), strict=True)) | inputs
            for name, observer in observers.items():
                observer(torch.from_numpy(values[name]))
            advance(1)
            batch = next(rest, None) if seen < limit else None
            inputs = None if batch is None else _arrays(batch, program.signature, seen + 1)
    return observers


def _arrays(batch: Any, signature: Signature, number: int) -> dict[str, np.ndarray]:
    tensors = _batches.to_tensors(batch, signature, where=f"calibration batch {number}")
    return {name: tensor.numpy() for name, tensor in zip(signature.input_names, tensors, strict=True)}


def _showing(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The model with these values among its outputs."""
    shown = onnx.ModelProto.FromString(model.SerializeToString())
    there = {value.name for value in (*shown.graph.output, *shown.graph.input)}
    for name in names:
        if name not in there:
            shown.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return shown


def _written(
    model: onnx.ModelProto, quantization: ResolvedQuantization, nodes: Sequence[str], observers: dict[str, Any]
) -> onnx.ModelProto:
    """The model with pairs around `nodes`, by onnxruntime's quantizer."""
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    unsigned = quantization.activations == "uint8-asymmetric"
    tensorrt = quantization.placement == "tensorrt"
    touched = [operator for _, operators, _ in onnx_placement.TABLES[quantization.placement] for operator in operators]
    ranges = {name: tuple(np.float32(float(v)) for v in o.range()) for name, o in observers.items()}
    ranges = {name: tuple(np.array(v) for v in ends) for name, ends in ranges.items() if ends[0] <= ends[1]}
    with _quiet():
        quantizer = QDQQuantizer(
            onnx.ModelProto.FromString(model.SerializeToString()),
            per_channel=quantization.per_channel,
            reduce_range=quantization.weight_bits == 7,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8 if unsigned else QuantType.QInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, ranges),
            nodes_to_quantize=list(nodes),
            nodes_to_exclude=[],
            op_types_to_quantize=touched,
            extra_options={
                "ActivationSymmetric": not unsigned,
                "WeightSymmetric": True,
                "QuantizeBias": not tensorrt,
                "OpTypesToExcludeOutputQuantization": touched if tensorrt else list(onnx_placement.FLOAT_OUTPUTS),
            },
        )
        try:
            quantizer.quantize_model()
        except Exception as why:  # an assertion or a KeyError about a form that it did not think of
            raise DeclinedError(
                f"onnxruntime's quantizer fails on the file: {type(why).__name__}: {first_line(why)}",
                where="stage 'quantize'", todo="name the nodes that it may be about in keep_float",
            ) from why  # fmt: skip
        quantizer.model.topological_sort()
    quantized = quantizer.model.model
    used = {node.domain for node in quantized.graph.node} | {""}
    for i in reversed([i for i, o in enumerate(quantized.opset_import) if o.domain not in (*used, "ai.onnx")]):
        del quantized.opset_import[i]
    return quantized


def _warnings(
    model: onnx.ModelProto, given: onnx.ModelProto, observers: dict[str, torch.nn.Module], lost: dict[str, str]
) -> tuple[str, ...]:
    makers = {name: node.name for node in model.graph.node for name in node.output}
    lines = []
    for name, observer in observers.items():
        shown = makers.get(name, name)
        if name in lost:
            lines.append(f"{shown}: kept float: {lost[name]}")
        else:
            lines += findings.value_lines(shown, observer)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Conv" and node.input[1] in stored:
            weight = onnx.numpy_helper.to_array(stored[node.input[1]])
            dead = int((np.abs(weight).reshape(len(weight), -1).max(1) == 0).sum())
            if dead:
                lines.append(f"{node.name}: {dead} of {len(weight)} channels are all zero")
    bodies = [node for node in given.graph.node if node.op_type in ("If", "Loop", "Scan")]
    if bodies:
        lines.append(f"{', '.join(n.name or n.op_type for n in bodies)}: what lies in the bodies stays float")
    return tuple(lines)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what onnxruntime's tools log: advice on options that are chosen here, and errors that they raise too."""
    import onnxruntime

    was = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    onnxruntime.set_default_logger_severity(4)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(2)  # its own default; it cannot be asked what was set
        logging.disable(was)
