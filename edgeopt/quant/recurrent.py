"""What becomes of recurrent layers: no pairs go around them, so the report says why, and what lowering may do."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import torch
from torch.fx import Node

from edgeopt.program import ExportedGraph, OnnxGraph, Program, fakes
from edgeopt.program.nodes import module_path
from edgeopt.program.parts import part_of
from edgeopt.program.patterns import aten_name
from edgeopt.quant.quantizer import Decision
from edgeopt.quant.report import QuantReport

RULE = "recurrent"
_KINDS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_SCRIPTED = re.compile(r"aten::(lstm|gru|rnn_tanh|rnn_relu)\b")


def reported(report: QuantReport, program: Program, *, dynamic: bool) -> QuantReport:
    """`report` with the program's LSTMs, GRUs and RNNs, which stay float in it and count for its coverage.

    `dynamic`: onnxruntime is a backend and may give LSTMs int8 weights when the file is written.
    """
    found = [
        Decision(name, RULE, kind, name, False, _reason(kind, dynamic), macs) for name, kind, macs in layers(program)
    ]
    if not found:
        return report
    every = (*report.layers, *found)
    total = sum(d.macs for d in every)
    return dataclasses.replace(
        report,
        counts={**report.counts, RULE: {"quantized": 0, "float": len(found)}},
        coverage=sum(d.macs for d in every if d.quantized) / total if total else 0.0,
        left_float={**report.left_float, **{d.node: d.reason for d in found}},
        layers=every,
    )


def _reason(kind: str, dynamic: bool) -> str:
    if kind != "LSTM":
        return f"{kind}: no runtime here has an integer kernel for it"
    if dynamic:
        return "LSTM: float here; int8 weights with scales found at run time in the candidate -int8-dynamic"
    return "LSTM: only onnxruntime has an integer kernel for it, of int8 weights (quantization.dynamic)"


def layers(program: Program) -> Iterator[tuple[str, str, int]]:
    """(name, 'LSTM', 'GRU' or 'RNN', multiply-accumulates) of each recurrent layer.

    The name is the module's path, of an ONNX file the node's. Of an ONNX file and of sizes that vary the steps that
    are not known count once.
    """
    if isinstance(program, OnnxGraph):
        stored = {tensor.name: math.prod(tensor.dims) for tensor in program.model.graph.initializer}
        for node in program.model.graph.node:
            if node.op_type in _KINDS.values():
                yield node.name or node.op_type, node.op_type, sum(stored.get(name, 0) for name in node.input[1:3])
    elif isinstance(program, ExportedGraph):
        for node in program.module.graph.nodes:
            if part := part_of(node):
                weights = [w for w in part.module.parameters() if w.ndim == 2]
                for kind in dict.fromkeys(_SCRIPTED.findall(str(part.module.inlined_graph))):
                    yield part.label, _KINDS[kind], _macs(node, weights)
            elif aten_name(node) in _KINDS:
                held = [w for arg in node.args if isinstance(arg, list | tuple) for w in arg if isinstance(w, Node)]
                weights = [w.meta["val"] for w in held if w.op == "get_attr" and "val" in w.meta]
                yield module_path(node) or node.name, _KINDS[aten_name(node)], _macs(node, weights)


def _macs(node: Node, weights: list[torch.Tensor]) -> int:
    """Each step of each sample multiplies with every weight matrix once."""
    value = node.args[0].meta.get("val")
    # the hint of a symbolic size is read without int(), which would fix the size for good
    steps = fakes.sizes(value)[:-1] if value is not None else []
    return math.prod(steps) * sum(w.numel() for w in weights if w.ndim == 2)
