"""Where quantize/dequantize pairs go: one small rule an operator pattern, an ordered table a target's kernels.

A rule looks at one node and its neighbours, by operator only, so that it does not matter which module a node came
from or how often that module was called. Rules run in graph order: what stands before a node is decided already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.program.patterns import aten_name as operator
from edgeopt.quant import pt2e
from edgeopt.quant.scheme import Scheme

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
ACTIVATIONS = ("relu", "relu6", "hardtanh", "clamp", "clamp_min")  # absorbed by the range of what follows them
LAYOUT = (
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze",
    "slice", "select", "expand", "clone", "contiguous", "dropout", "alias", "pixel_shuffle",
)  # fmt: skip
MAX_POOLING = ("max_pool1d", "max_pool2d", "max_pool3d")
AVERAGE_POOLING = (
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "mean",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """`place(node, scheme)` annotates a node of one of `operators` and returns None, or why it stays float."""

    name: str
    operators: tuple[str, ...]
    place: Callable[[Node, Scheme], str | None]


def is_float_tensor(node: object) -> bool:
    """Whether `node` yields one float32 tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def is_weight(node: object) -> bool:
    """Whether `node` is a stored float32 tensor."""
    return isinstance(node, Node) and node.op == "get_attr" and is_float_tensor(node)


def is_quantized(node: Node) -> bool:
    """Whether a rule quantizes the output of `node`."""
    annotation = node.meta.get(pt2e.Q_ANNOTATION_KEY)
    return annotation is not None and annotation.output_qspec is not None


def annotate(node: Node, inputs: dict, output: object = None) -> None:
    """Put the specifications on the edges from `inputs` and on the output of `node`."""
    node.meta[pt2e.Q_ANNOTATION_KEY] = pt2e.QuantizationAnnotation(
        input_qspec_map=inputs, output_qspec=output, _annotated=True
    )


def _annotate_output(node: Node, scheme: Scheme) -> None:
    """Quantize after the activation that follows `node`, where there is one, else after `node` itself."""
    end = node
    users = list(node.users)
    if len(users) == 1 and operator(users[0]) in ACTIVATIONS and users[0].args[0] is node:
        end = users[0]
    annotation = end.meta.setdefault(pt2e.Q_ANNOTATION_KEY, pt2e.QuantizationAnnotation(_annotated=True))
    annotation.output_qspec = scheme.activation


def _argument(node: Node, index: int) -> object:
    return node.args[index] if len(node.args) > index else None


def _channel_axis(node: Node) -> int:
    """The weight's axis of output channels: 1 for transposed convolutions, [in, out/groups, ...], else 0."""
    transposed = operator(node) in TRANSPOSED or (operator(node) == "convolution" and bool(_argument(node, 6)))
    return 1 if transposed else 0


def _weighted(node: Node, scheme: Scheme, *, integer_bias: bool) -> str | None:
    source, weight, bias = node.args[0], node.args[1], _argument(node, 2)
    if not is_float_tensor(source):
        return "its input is not float32"
    if not is_weight(weight):
        return "its weight is computed in the graph"
    inputs = {source: scheme.activation, weight: scheme.weight(_channel_axis(node))}
    if integer_bias and is_weight(bias):
        inputs[bias] = scheme.bias(source, weight, node)
    annotate(node, inputs)
    return None


def _convolution(node: Node, scheme: Scheme) -> str | None:
    refused = _weighted(node, scheme, integer_bias=scheme.integer_bias)
    if refused is None:
        _annotate_output(node, scheme)
    return refused


def _no_kernel(node: Node, scheme: Scheme) -> str:
    return "the runtime has no integer kernel for it"


def _linear(node: Node, scheme: Scheme) -> str | None:
    # Only a linear of a matrix becomes one Gemm; of higher rank it becomes MatMul and Add, and the Add stays float.
    # The output is left alone: the kernels give float as cheaply, and what needs integers asks for them at its input.
    matrix = is_float_tensor(node.args[0]) and node.args[0].meta["val"].ndim == 2
    return _weighted(node, scheme, integer_bias=scheme.integer_bias and matrix)


def _matmul(node: Node, scheme: Scheme) -> str | None:
    left, right = node.args[:2]
    if not (is_float_tensor(left) and is_float_tensor(right)) or is_weight(left):
        return "its operands are not float32 activations times activations or a weight"
    by_weight = is_weight(right) and right.meta["val"].ndim == 2
    annotate(node, {left: scheme.activation, right: scheme.weight(1) if by_weight else scheme.activation})
    return None


def _is_tensor_add(node: Node) -> bool:
    return len(node.args) == 2 and all(map(is_float_tensor, node.args)) and node.kwargs.get("alpha", 1) == 1


def _add(node: Node, scheme: Scheme) -> str | None:
    if not _is_tensor_add(node):
        return "it is not a plain addition of two float32 tensors"
    if not any(map(is_quantized, node.args)):
        return "neither operand is an integer already"
    annotate(node, dict.fromkeys(node.args, scheme.activation))
    _annotate_output(node, scheme)
    return None


def _concat(node: Node, scheme: Scheme) -> str | None:
    parts = list(dict.fromkeys(node.args[0]))
    if not all(map(is_float_tensor, parts)) or not any(map(is_quantized, parts)):
        return "no operand is an integer already"
    shared = pt2e.SharedQuantizationSpec((parts[0], node))
    annotate(node, {parts[0]: scheme.activation} | dict.fromkeys(parts[1:], shared), shared)
    return None


def _pooling(node: Node, scheme: Scheme) -> str | None:
    if not is_float_tensor(node.args[0]) or not is_quantized(node.args[0]):
        return "its operand is no integer"
    annotate(node, {node.args[0]: scheme.activation})
    _annotate_output(node, scheme)
    return None


def _pass_through(node: Node, scheme: Scheme) -> str | None:
    source = node.args[0]
    if not is_float_tensor(node) or not is_float_tensor(source) or not is_quantized(source):
        return "its operand is no integer"
    annotate(node, {source: scheme.activation}, pt2e.SharedQuantizationSpec((source, node)))
    return None


def _zero_pad(node: Node, scheme: Scheme) -> str | None:
    mode = _argument(node, 2) if operator(node) == "pad" else "constant"
    value = _argument(node, 3 if operator(node) == "pad" else 2)
    if mode not in (None, "constant") or value not in (None, 0, 0.0):
        return "it pads by something other than 0"
    return _pass_through(node, scheme)


def _inputs_only(node: Node, scheme: Scheme) -> str | None:
    return _weighted(node, scheme, integer_bias=False)


def _residual_add(node: Node, scheme: Scheme) -> str | None:
    """Only the operand that is not fused: TensorRT fuses the add into the convolution that feeds the other one."""
    if not _is_tensor_add(node):
        return "it is not a plain addition of two float32 tensors"
    fused = [operator(a) in CONVOLUTIONS + TRANSPOSED and len(a.users) == 1 for a in node.args]
    if not any(fused):
        return "no convolution feeds it alone"
    residual = node.args[0] if fused == [False, True] else node.args[1]
    annotate(node, {residual: scheme.activation})
    return None


# onnxruntime fuses DQ - operator - Q into one integer kernel: inputs and outputs are quantized. It has no integer
# ConvTranspose (1.16 and 1.32 read), and SiLU, GELU, softmax and norms stay one float unit between two pairs.
ONNXRUNTIME = (
    Rule("convolution", CONVOLUTIONS, _convolution),
    Rule("transposed convolution", TRANSPOSED, _no_kernel),
    Rule("linear", ("linear",), _linear),
    Rule("matmul", ("matmul", "bmm", "mm"), _matmul),
    Rule("add", ("add",), _add),
    Rule("concat", ("cat", "concat", "concatenate"), _concat),
    Rule("average pooling", AVERAGE_POOLING, _pooling),
    Rule("zero padding", ("pad", "constant_pad_nd"), _zero_pad),
    Rule("layout", (*LAYOUT, *MAX_POOLING), _pass_through),
)

# TensorRT fuses forward from DQ: inputs of convolution and matrix product, and the residual operand of an add, so
# that the fused convolution may give integers; pairs anywhere else would break fusions.
TENSORRT = (
    Rule("convolution", CONVOLUTIONS, _inputs_only),
    Rule("transposed convolution", TRANSPOSED, _inputs_only),
    Rule("linear", ("linear",), _inputs_only),
    Rule("matmul", ("matmul", "bmm", "mm"), _matmul),
    Rule("add", ("add",), _residual_add),
)

PLACEMENTS = {"onnxruntime-x86": ONNXRUNTIME, "onnxruntime-arm": ONNXRUNTIME, "tensorrt": TENSORRT}
COUNTED = {"convolution", "transposed convolution", "linear", "matmul"}  # where the arithmetic is
