"""The backends by name, in the order in which they are tried where a profile names none."""

from __future__ import annotations

from edgeopt.backends import aoti, onnxruntime, openvino, tensorrt, torchscript
from edgeopt.backends.backend import Backend

BACKENDS: dict[str, Backend] = {
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "torchscript": torchscript,
    "aoti": aoti,
    "tensorrt": tensorrt,
}
