"""Where quantize/dequantize pairs go: one small rule an operator pattern, an ordered table a target's kernels.

A rule looks at one node and its neighbours, by operator only, so that it does not matter which module a node came
from or how often that module was called. Rules run in graph order: what stands before a node is decided already.
"""

from __future__ import annotations

from edgeopt.quant import rules_openvino
from edgeopt.quant.annotations import (
    ACTIVATIONS,
    CONVOLUTIONS,
    TRANSPOSED,
    Rule,
    is_float_tensor,
    is_quantized,
    is_weight,
    operator,
    stays_float,
)
from edgeopt.quant.rules_products import convolution, embedding, inputs_only, linear, matmul, matmul_by_weight, zero_pad
from edgeopt.quant.rules_values import (
    AVERAGE_POOLING,
    LAYOUT,
    MAX_POOLING,
    SPLITS,
    add,
    concat,
    multiply,
    pass_through,
    pointwise,
    pooling,
    residual_add,
    split,
)

__all__ = [
    "ACTIVATIONS", "ATTENTION", "CONVOLUTIONS", "COUNTED", "LAYOUT", "MATMULS", "ONNXRUNTIME", "PLACEMENTS", "TENSORRT",
    "TRANSPOSED", "Rule", "is_float_tensor", "is_quantized", "is_weight", "operator",
]  # fmt: skip

MATMULS = ("matmul", "bmm", "mm")
ATTENTION = ("scaled_dot_product_attention",)
_CONCAT = ("cat", "concat", "concatenate")
_PADS = ("pad", "constant_pad_nd")
_SMOOTH = ("silu", "gelu", "hardswish", "mish", "hardsigmoid", "elu", "selu", "celu", "softplus", "tanh")
_WHOLE = stays_float("it stays one float unit: a pair inside of it would cost more than a step")
_NO_KERNEL = stays_float("the runtime has no integer kernel for it")
_PROBABILITIES = stays_float("its results are small probabilities, of which 8 bits keep few")

# onnxruntime fuses DQ - operator - Q into one integer kernel: inputs and outputs are quantized. What it has kernels
# for was read from the graphs that 1.32 makes: QLinearConv, QGemm, QLinearMatMul, MatMulIntegerToFloat, QLinearAdd,
# -Mul, -Sigmoid, -LeakyRelu, -AveragePool, -GlobalAveragePool and -Concat, and MaxPool, ReduceMax, Resize (nearest),
# Split, Slice, Transpose and Reshape on integers of one scale. It has none for ConvTranspose, Pad, ReduceMean, tanh,
# HardSwish, Gelu and norms, and a pair around one of these is a float operator with two conversions.
ONNXRUNTIME = (
    Rule("zero padding", _PADS, zero_pad),
    Rule("convolution", CONVOLUTIONS, convolution),
    Rule("transposed convolution", TRANSPOSED, _NO_KERNEL),
    Rule("linear", ("linear",), linear),
    Rule("matmul", MATMULS, matmul_by_weight),
    Rule("attention", ATTENTION, stays_float("it multiplies activations, which the runtime does faster in float")),
    Rule("embedding", ("embedding",), embedding),
    Rule("add", ("add",), add),
    Rule("mul", ("mul",), multiply),
    Rule("concat", _CONCAT, concat),
    Rule("average pooling", AVERAGE_POOLING, pooling),
    Rule("mean", ("mean",), _NO_KERNEL),
    Rule("pointwise", ("sigmoid", "leaky_relu"), pointwise),
    Rule("smooth activation", _SMOOTH, _WHOLE),
    Rule("softmax", ("softmax", "_softmax"), _PROBABILITIES),
    Rule("split", SPLITS, split),
    Rule("layout", (*LAYOUT, *MAX_POOLING, "amax"), pass_through),
)

# TensorRT fuses forward from DQ: inputs of convolution and matrix product, and the residual operand of an add, so
# that the fused convolution may give integers; pairs anywhere else would break fusions.
TENSORRT = (
    Rule("convolution", CONVOLUTIONS, inputs_only),
    Rule("transposed convolution", TRANSPOSED, inputs_only),
    Rule("linear", ("linear",), inputs_only),
    Rule("matmul", MATMULS, matmul),
    Rule("attention", ATTENTION, _WHOLE),
    Rule("add", ("add",), residual_add),
)

# As onnxruntime's, but smooth and other activations are float parts of the convolution before them
_OPENVINO_OWN = (
    Rule("convolution", CONVOLUTIONS, rules_openvino.convolution),
    Rule("transposed convolution", TRANSPOSED, rules_openvino.convolution),
    Rule("mul", ("mul",), stays_float("OpenVINO multiplies element by element in float")),
    Rule("pointwise", ("sigmoid", "leaky_relu"), _WHOLE),
)
_OWN_NAMES = {rule.name: rule for rule in _OPENVINO_OWN}
OPENVINO = tuple(_OWN_NAMES.get(rule.name, rule) for rule in ONNXRUNTIME)

PLACEMENTS = {
    "onnxruntime-x86": ONNXRUNTIME, "onnxruntime-arm": ONNXRUNTIME, "openvino": OPENVINO, "tensorrt": TENSORRT,
}  # fmt: skip
# where the arithmetic is
COUNTED = {"convolution", "transposed convolution", "linear", "matmul", "attention"}
