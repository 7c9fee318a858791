"""Rules of the operators between layers: sums, products, concatenation, pooling, activations, layout."""

from __future__ import annotations

import operator as python_operator

from torch.fx import Node

from edgeopt.quant import pt2e
from edgeopt.quant.annotations import (
    CONVOLUTIONS,
    TRANSPOSED,
    annotate,
    annotate_output,
    is_float_tensor,
    is_kept_float,
    is_quantized,
    is_weight,
    operator,
)
from edgeopt.quant.scheme import Scheme

LAYOUT = (
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze",
    "slice", "select", "expand", "clone", "contiguous", "dropout", "alias", "pixel_shuffle", "upsample_nearest2d",
)  # fmt: skip
MAX_POOLING = ("max_pool1d", "max_pool2d", "max_pool3d")
SPLITS = ("split", "split_with_sizes", "chunk")
AVERAGE_POOLING = (
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
)  # fmt: skip
_GATES = ("sigmoid", "tanh", "hardsigmoid")
# What reads integers, so that keeping them so up to there gains.
_TAKE_INTEGERS = (
    *CONVOLUTIONS, "linear", "add", "mul", "cat", "concat", "concatenate", *AVERAGE_POOLING, *MAX_POOLING, *SPLITS,
    *LAYOUT,
)  # fmt: skip


def _is_tensor_add(node: Node) -> bool:
    return len(node.args) == 2 and all(map(is_float_tensor, node.args)) and node.kwargs.get("alpha", 1) == 1


def add(node: Node, scheme: Scheme) -> str | None:
    """Both operands and the result, where one of them is an integer already."""
    if not _is_tensor_add(node):
        return "it is not a plain addition of two float32 tensors"
    if not any(map(is_quantized, node.args)):
        return "neither operand is an integer already"
    annotate(node, dict.fromkeys(node.args, scheme.activation))
    annotate_output(node, scheme)
    return None


def residual_add(node: Node, scheme: Scheme) -> str | None:
    """Only the operand that is not fused: TensorRT fuses the add into the convolution that feeds the other one."""
    if not _is_tensor_add(node):
        return "it is not a plain addition of two float32 tensors"
    fused = [operator(a) in CONVOLUTIONS + TRANSPOSED and len(a.users) == 1 for a in node.args]
    if not any(fused):
        return "no convolution feeds it alone"
    residual = node.args[0] if fused == [False, True] else node.args[1]
    annotate(node, {residual: scheme.activation})
    return None


def multiply(node: Node, scheme: Scheme) -> str | None:
    """A product of two activations, as of a squeeze-and-excitation: both operands and the result.

    x * sigmoid(x) is a SiLU in two operators, and stays one float unit: of three quantized steps, x, its sigmoid and
    the product, few values are left below 0.
    """
    if len(node.args) != 2 or not all(map(is_float_tensor, node.args)):
        return "it is not a product of two float32 tensors"
    if any(map(is_weight, node.args)):
        return "one operand is stored, and would get one scale for all of its channels"
    if is_gated_by_itself(node):
        return "it is a smooth activation in two operators, which stays whole"
    if not any(map(is_quantized, node.args)):
        return "neither operand is an integer already"
    annotate(node, dict.fromkeys(node.args, scheme.activation))
    annotate_output(node, scheme)
    return None


def is_gated_by_itself(node: Node) -> bool:
    """Whether `node` is x * g(x) for a gate g, in either order."""
    if operator(node) != "mul" or len(node.args) != 2:
        return False
    return any(operator(gate) in _GATES and gate.args[0] is x for gate, x in (node.args, node.args[::-1])
               if isinstance(gate, Node))  # fmt: skip


def pointwise(node: Node, scheme: Scheme) -> str | None:
    """One table of 256 entries in the runtime, between integers on both sides."""
    source = node.args[0]
    if not is_float_tensor(source) or not is_quantized(source):
        return "its operand is no integer"
    if any(is_gated_by_itself(user) and source in user.args for user in node.users):
        return "it is part of a smooth activation, which stays whole"
    if not any(operator(user) in _TAKE_INTEGERS and not is_kept_float(user) for user in node.users):
        return "nothing after it takes integers"
    annotate(node, {source: scheme.activation}, scheme.activation)
    return None


def concat(node: Node, scheme: Scheme) -> str | None:
    """Each operand with its own scale, and the result with one of its own; `sharing` joins those that are near."""
    parts = list(dict.fromkeys(node.args[0]))
    if not all(map(is_float_tensor, parts)) or not any(map(is_quantized, parts)):
        return "no operand is an integer already"
    annotate(node, dict.fromkeys(parts, scheme.activation), scheme.activation)
    return None


def pooling(node: Node, scheme: Scheme) -> str | None:
    """Averages over windows: input and result. What varies in size was left as a mean over all of it."""
    if operator(node).startswith("adaptive") and set(node.args[1]) == {1}:
        return "the runtime takes the mean over a picture of varying size in float"
    if not is_float_tensor(node.args[0]) or not is_quantized(node.args[0]):
        return "its operand is no integer"
    annotate(node, {node.args[0]: scheme.activation})
    annotate_output(node, scheme)
    return None


def pass_through(node: Node, scheme: Scheme) -> str | None:
    """What moves values or chooses among them gives integers of the same scale."""
    source = node.args[0]
    if not is_float_tensor(node) or not is_float_tensor(source) or not is_quantized(source):
        return "its operand is no integer"
    annotate(node, {source: scheme.activation}, pt2e.SharedQuantizationSpec((source, node)))
    return None


def split(node: Node, scheme: Scheme) -> str | None:
    """The same for what gives several tensors."""
    source = node.args[0]
    if not is_float_tensor(source) or not is_quantized(source):
        return "its operand is no integer"
    annotate(node, {source: scheme.activation})
    for item in node.users:
        if item.target is python_operator.getitem:
            annotate(item, {}, pt2e.SharedQuantizationSpec((source, node)))
    return None
