"""Operators that came to TensorRT's parser later than to ONNX, and with which version: checked before the build.

Source: docs/Changelog.md of onnx/onnx-tensorrt, which TensorRT ships as its parser. What is not in this table is
either in every version from 8.0 on or in none, which the device's parser says.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import GraphProto, TensorProto

from edgeopt.spec.jetpack import version_tuple

_SINCE = {
    (8, 2): ("Einsum", "IsNaN", "GatherND", "ScatterElements", "ScatterND", "Sign", "Round"),
    (8, 4): ("Shrink", "Xor"),
    (8, 5): ("RandomNormal", "RandomUniform", "MeanVarianceNormalization", "RoiAlign", "Mod", "Trilu", "GridSample",
             "NonZero"),
    (8, 6): ("GroupNormalization", "LayerNormalization", "IsInf"),
    (9, 2): ("Hardmax",),
    (10, 1): ("DeformConv",),
    (10, 4): ("BlackmanWindow", "HammingWindow", "HannWindow"),
    (10, 5): ("STFT",),
}  # fmt: skip
_UINT8_SINCE = (8, 5)  # as the type of an input or output


def lacking(file: Path, tensorrt: str) -> str | None:
    """Why TensorRT `tensorrt` cannot read the ONNX file, with operator and node; None where the table knows nothing."""
    graph, version = onnx.load(file, load_external_data=False).graph, version_tuple(tensorrt)
    since = {name: least for least, names in _SINCE.items() for name in names}
    for node in _nodes(graph):
        least = since.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if least and version < least:
            came = ".".join(map(str, least))
            where = f" (node '{node.name}')" if node.name else ""
            return f"TensorRT {tensorrt} has no operator {node.op_type}{where}: it came with {came}"
    ends = (*graph.input, *graph.output)
    bytes_ = [v.name for v in ends if v.type.tensor_type.elem_type == TensorProto.UINT8]
    if bytes_ and version < _UINT8_SINCE:
        return f"TensorRT {tensorrt} takes no uint8 as an input or output ('{bytes_[0]}'): it came with 8.5"
    return None


def _nodes(graph: GraphProto):
    """Every node, those in the bodies of If, Loop and Scan too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _nodes(body)
