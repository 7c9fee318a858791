"""FLOPs of the operators that torch's FlopCounterMode does not count: formulas for contractions, estimates for others.

A multiply-add counts as 2. An elementwise function counts as 1 for each element of its result, however costly it is,
and a fused one as the plain ones that it stands for: SiLU as 2 (sigmoid, product), softmax as 5 (maximum, difference,
exponential, sum, quotient). A reduction counts 1 for each element that it reads, pooling 1 for each element of its
window. Copies, gathers, reshapes and constants count 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_flop_count

_aten = torch.ops.aten

# Per element of the first result. What is not named here counts 1.
_PER_OUTPUT = {
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax", "Softmax"), 5),
    **dict.fromkeys(("log_softmax", "_log_softmax", "LogSoftmax"), 5),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "instance_norm"), 7),
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization", "GroupNormalization"), 7),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm", "RMSNormalization"), 4),
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm"), 2),
    **dict.fromkeys(("_batch_norm_no_update", "BatchNormalization"), 2),
    **dict.fromkeys(("silu", "silu_", "Swish"), 2),
    **dict.fromkeys(("gelu", "Gelu", "mish", "mish_", "Mish"), 5),
    **dict.fromkeys(("hardswish", "hardswish_", "HardSwish"), 4),
    **dict.fromkeys(("hardsigmoid", "hardsigmoid_", "HardSigmoid", "softplus", "Softplus", "elu", "elu_", "Elu"), 3),
    **dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp", "var", "std", "var_mean"), 2),
    **dict.fromkeys(("quantize_per_tensor", "quantize_per_channel", "QuantizeLinear"), 4),
    **dict.fromkeys(("dequantize_per_tensor", "dequantize_per_channel", "DequantizeLinear"), 2),
    **dict.fromkeys(("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"), 6),
    **dict.fromkeys(("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_linear1d"), 8),
    **dict.fromkeys(("upsample_bicubic2d", "grid_sampler", "grid_sampler_2d", "GridSample"), 16),
}

_FREE = {
    "alias", "arange", "as_strided", "cat", "chunk", "clone", "concat", "constant_pad_nd", "contiguous", "copy",
    "copy_", "detach", "detach_", "dropout", "embedding", "empty", "empty_like", "expand", "expand_as", "eye", "fill",
    "fill_", "flatten", "flip", "full", "full_like", "gather", "im2col", "index", "index_put", "index_put_",
    "index_select", "lift_fresh_copy", "linspace", "masked_select", "movedim", "narrow", "new_empty", "new_full",
    "new_ones", "new_zeros", "nonzero", "one_hot", "ones", "ones_like", "pad", "permute", "pixel_shuffle",
    "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d", "repeat", "repeat_interleave", "replication_pad1d",
    "replication_pad2d", "reshape", "roll", "scalar_tensor", "scatter", "scatter_", "select", "select_scatter",
    "slice", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "sym_size", "t", "tensor_split", "tile",
    "to", "_to_copy", "transpose", "tril", "triu", "type_as", "unbind", "unflatten", "unfold", "unsqueeze",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view", "view_as", "_unsafe_view", "zeros",
    "zeros_like", "lift_fresh", "sort", "topk", "argsort",
    "Cast", "CastLike", "Compress", "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Dropout", "Expand",
    "EyeLike", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "NonMaxSuppression", "NonZero", "OneHot",
    "Pad", "Range", "Reshape", "Scatter", "ScatterElements", "ScatterND", "Shape", "Size", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze",
}  # fmt: skip

_REDUCTIONS = {
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "all", "amax", "amin", "any", "argmax", "argmin", "cumprod", "cumsum", "linalg_vector_norm",
    "logsumexp", "max", "mean", "median", "min", "norm", "prod", "std", "sum", "var", "var_mean",
    "ArgMax", "ArgMin", "CumSum", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpNormalization", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare",
}  # fmt: skip

_POOLS = {
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "AveragePool", "LpPool", "MaxPool",
}  # fmt: skip

_GATHERS = {
    "embedding", "index_select", "gather", "index", "select", "slice", "Gather", "GatherElements", "GatherND", "Slice",
}  # fmt: skip
_OF_WEIGHTS = ("quantize_per", "dequantize_per", "QuantizeLinear", "DequantizeLinear")


def estimated(op: str, inputs: int, outputs: int, window: int = 1) -> int:
    """FLOPs of an operator that is no contraction, by its name in aten or ONNX.

    `inputs` and `outputs` are the elements of its largest input and of its first result; `window` those that a
    pooling window covers.
    """
    if op in _FREE:
        return 0
    if op in _POOLS:
        return window * outputs
    if op in _REDUCTIONS and inputs > outputs:
        return inputs * _PER_OUTPUT.get(op, 1)
    return outputs * _PER_OUTPUT.get(op, 1)


def of_weight(op: str, stored: bool) -> bool:
    """Whether the operator quantizes or dequantizes a `stored` tensor: done once, by whoever loads the program."""
    return stored and op.startswith(_OF_WEIGHTS)


def gathers(op: str) -> bool:
    """Whether the operator reads of its first input only the elements that it returns."""
    return op in _GATHERS


def _attention(query, key, value, *rest, out_shape=None, **named) -> int:
    return sdpa_flop_count(query, key, value)


def _dot(a, b, *rest, out_shape=None, **named) -> int:
    return 2 * math.prod(a)


def _mv(matrix, vector, *rest, out_shape=None, **named) -> int:
    return 2 * math.prod(matrix)


def _addmv(base, matrix, vector, *rest, out_shape=None, **named) -> int:
    return 2 * math.prod(matrix)


def _addbmm(base, a, b, *rest, out_shape=None, **named) -> int:
    return 2 * math.prod(a) * b[-1]


def _trilinear(a, b, c, expand_a, expand_b, expand_c, sumdim, *rest, out_shape=None, **named) -> int:
    """Products over the broadcast of the three: two multiplications and an addition for each element."""
    shapes = []
    for shape, expand in ((a, expand_a), (b, expand_b), (c, expand_c)):
        shape = list(shape)
        for at in expand:
            shape.insert(at, 1)
        shapes.append(shape)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


def _recurrent(x, weights_x, weights_h, *rest, out_shape=None, **named) -> int:
    """One direction of one layer, x [time, batch, features]: both products of every gate at every step."""
    return 2 * x[0] * x[1] * (math.prod(weights_x) + math.prod(weights_h))


# Contractions that torch 2.11 to 2.13 leave uncounted: attention's and LSTM's kernels for the CPU, and vectors.
FORMULAS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten.dot: _dot,
    _aten.vdot: _dot,
    _aten.mv: _mv,
    _aten.addmv: _addmv,
    _aten.addbmm: _addbmm,
    _aten._trilinear: _trilinear,
    _aten.mkldnn_rnn_layer: _recurrent,
}
