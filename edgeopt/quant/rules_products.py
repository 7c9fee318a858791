"""Rules of the operators that multiply by weights: convolutions, linear layers, matrix products, embeddings."""

from __future__ import annotations

from torch.fx import Node

from edgeopt.program.qdq import is_dequantize
from edgeopt.quant.annotations import (
    CONVOLUTIONS,
    TRANSPOSED,
    annotate,
    annotate_output,
    argument,
    is_float_tensor,
    is_kept_float,
    is_weight,
    operator,
)
from edgeopt.quant.scheme import Scheme

_PADDING = 4  # position among a convolution's arguments


def _channel_axis(node: Node) -> int:
    """The weight's axis of output channels: 1 for transposed convolutions, [in, out/groups, ...], else 0."""
    transposed = operator(node) in TRANSPOSED or (operator(node) == "convolution" and bool(argument(node, 6)))
    return 1 if transposed else 0


def _weighted(node: Node, scheme: Scheme, *, integer_bias: bool) -> str | None:
    source, weight, bias = node.args[0], node.args[1], argument(node, 2)
    if not is_float_tensor(source):
        return "its input is not float32"
    if not is_weight(weight):
        return "its weight is computed in the graph"
    edge: tuple[Node, Node] | None = (source, node)
    inputs = {weight: scheme.weight(_channel_axis(node))}
    if source.meta.get(_ABSORBED):
        edge = (source.args[0], source)
    elif is_dequantize(source):
        edge = None  # a camera's bytes, which are integers of scale 1 as they come
    else:
        inputs[source] = scheme.activation
    if integer_bias and is_weight(bias):
        inputs[bias] = scheme.bias(edge, (weight, node))
    annotate(node, inputs)
    return None


def convolution(node: Node, scheme: Scheme) -> str | None:
    """Inputs, weight, bias and output, so that onnxruntime makes one QLinearConv of all."""
    refused = _weighted(node, scheme, integer_bias=scheme.integer_bias)
    if refused is None:
        annotate_output(node, scheme)
    return refused


def inputs_only(node: Node, scheme: Scheme) -> str | None:
    """Input and weight of a convolution or linear layer: TensorRT fuses forward from them."""
    return _weighted(node, scheme, integer_bias=False)


def linear(node: Node, scheme: Scheme) -> str | None:
    """Input and weight. Only a linear of a matrix becomes one Gemm, with the bias inside.

    Of higher rank it becomes MatMul and Add, and the Add stays float. The output is left alone: the kernels give
    float as cheaply, and what needs integers asks for them at its input.
    """
    matrix = is_float_tensor(node.args[0]) and node.args[0].meta["val"].ndim == 2
    return _weighted(node, scheme, integer_bias=scheme.integer_bias and matrix)


def matmul(node: Node, scheme: Scheme) -> str | None:
    """Both operands, activations or a weight on the right."""
    left, right = node.args[:2]
    if not (is_float_tensor(left) and is_float_tensor(right)) or is_weight(left):
        return "its operands are not float32 activations times activations or a weight"
    by_weight = is_weight(right) and right.meta["val"].ndim == 2
    annotate(node, {left: scheme.activation, right: scheme.weight(1) if by_weight else scheme.activation})
    return None


def matmul_by_weight(node: Node, scheme: Scheme) -> str | None:
    """A product by a weight only.

    Of two activations the integer product is slower than the float one: its right side is quantized and packed at
    every call (measured, onnxruntime 1.32 on x86 with VNNI, one thread: 1.1 to 1.5 of the float time for 12 products
    from 16 x 64 x 16 to 512 x 512 x 64, uint8 or int8; by a weight .2 to .9 from 16 rows of 128 on).
    """
    if not is_weight(argument(node, 1)):
        return "it multiplies two activations, which the runtime does faster in float"
    return matmul(node, scheme)


def embedding(node: Node, scheme: Scheme) -> str | None:
    """The table as integers, a scale a row; what is looked up becomes float."""
    table = node.args[0]
    if not is_weight(table):
        return "its table is computed in the graph"
    tied = any(user is not node and operator(user) in ("linear", "embedding") for user in table.users)
    annotate(node, {table: scheme.weight(0) if tied else scheme.table})
    return None


_ABSORBED = "edgeopt_pad_is_absorbed"  # the mark on a padding node that its convolutions take in


def zero_pad(node: Node, scheme: Scheme) -> str | None:
    """Zero padding that only convolutions read is quantized before it, not after.

    onnxruntime moves such a Pad into the convolutions (from opset 11 on, also where the sides differ, which aten's own
    convolutions cannot say); with a pair after it, it would stay a float operator between two integer ones. Any
    other padding by zeros is done on the integers as they are.
    """
    source = node.args[0]
    if not _pads_with_zeros(node):
        return "it pads by something other than 0"
    if not is_float_tensor(source):
        return "its input is not float32"
    if not all(_can_absorb(user, node) for user in node.users):
        return "not only convolutions read it, and the runtime pads in float"
    node.meta[_ABSORBED] = True
    annotate(node, {source: scheme.activation})
    return None


def _pads_with_zeros(node: Node) -> bool:
    mode = argument(node, 2) if operator(node) == "pad" else "constant"
    value = argument(node, 3 if operator(node) == "pad" else 2)
    mode, value = node.kwargs.get("mode", mode), node.kwargs.get("value", value)
    amounts = node.args[1]
    plain = all(isinstance(a, int) and a >= 0 for a in amounts)
    spatial = node.meta["val"].ndim - 2
    return mode in (None, "constant") and value in (None, 0, 0.0) and plain and not any(amounts[2 * spatial :])


def _can_absorb(conv: Node, pad: Node) -> bool:
    if operator(conv) not in CONVOLUTIONS[:3] or is_kept_float(conv) or isinstance(argument(conv, _PADDING), str):
        return False
    return conv.args[0] is pad and is_weight(conv.args[1])
