"""Which operators keep fp32 whatever their values are, and why: the rules of the half-precision stage.

The lists follow what PyTorch's autocast keeps in float32 ("CUDA Ops that can autocast to float32" in its docs, torch
2.13), without those whose kernels only differ in speed, and with what autocast leaves to the user: constants, long
sums, positions made of integers. bf16 has the range of fp32, so that fewer rules hold for it: those of precision.
"""

from __future__ import annotations

import math
import operator as _operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.passes import aliases
from edgeopt.program.patterns import aten_name
from edgeopt.spec.half_formats import HalfFormat

# Contractions and what holds most of the weights: where a 16-bit type pays. Never moved to fp32 to save a cast.
HEAVY = frozenset({
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "einsum", "bilinear",
    "scaled_dot_product_attention", "embedding", "embedding_bag",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
})  # fmt: skip
ATTENTION = "scaled_dot_product_attention"
# Sums of more terms keep fp32: in a 16-bit accumulator n terms err by about sqrt(n) roundings, and by n at worst.
MOST_SUMMED = 64
# A constant may be off by so much once it is rounded: 1e-6 in fp16 is off by 1.3 %, 1e-7 by 19 %.
_CONSTANT_ERROR = 1 / 64

_VALUE_TYPES = ("number", "float", "Tensor")  # a graph may give a plain number where the schema says Tensor
_BOTH = ("fp16", "bf16")
_FP16 = ("fp16",)
_RULES: tuple[tuple[tuple[str, ...], str, frozenset[str]], ...] = (
    (_FP16, "an exponential overflows from 11.1 on, and small probabilities vanish", frozenset({
        "softmax", "_softmax", "_safe_softmax", "exp", "exp2", "expm1", "softplus", "logaddexp", "sinh", "cosh",
    })),
    (_FP16, "logarithms and roots of values near 0 lose them", frozenset({
        "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "logit", "xlogy",
    })),
    (_FP16, "a norm squares its input, which overflows from 256 on, and adds a small eps", frozenset({
        "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "native_group_norm",
        "instance_norm",
    })),
    (_BOTH, "the statistics of a batch norm lose precision", frozenset({
        "batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "_batch_norm_no_update",
        "cudnn_batch_norm",
    })),
    (_BOTH, "powers overflow and multiply the rounding of their input", frozenset({"pow", "float_power"})),
    (_BOTH, "log-probabilities are large, and their differences matter", frozenset({
        "log_softmax", "_log_softmax", "logsumexp",
    })),
    (_BOTH, "rounding adds up along a running sum or product", frozenset({
        "cumsum", "cumprod", "logcumsumexp", "prod", "trapezoid", "cumulative_trapezoid",
    })),
    (_BOTH, "it sums squares or differences", frozenset({
        "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm",
        "cdist", "_cdist_forward", "_euclidean_dist", "pdist", "dist", "cosine_similarity", "pairwise_distance",
        "renorm",
    })),
    (_BOTH, "its argument is an angle or a position, whose absolute error counts", frozenset({
        "sin", "cos", "tan", "asin", "acos", "atan2", "erfinv", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d",
        "affine_grid_generator", "bucketize", "searchsorted",
    })),
    (_BOTH, "near 1 and -1 its steps are coarse, and what follows takes the difference", frozenset({"erf", "erfc"})),
    (_BOTH, "runtimes have no 16-bit kernel for it", frozenset({
        "quantile", "nanquantile", "histc", "stft", "istft", "det", "slogdet", "logdet", "inverse", "pinverse",
        "cholesky", "trace", "view_as_complex", "complex", "polar", "nms", "roi_align", "unique", "mode", "kthvalue",
    })),
)  # fmt: skip
_PREFIXES = (("fft_", "runtimes have no 16-bit kernel for it"), ("linalg_", "runtimes have no 16-bit kernel for it"))
_LOSSES = ("_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_SUMS = ("sum", "mean", "nansum", "nanmean")
_POOLS = ("avg_pool1d", "avg_pool2d", "avg_pool3d")
_ADAPTIVE_POOLS = ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d")


def makes_float(node: Node) -> bool:
    """Whether a float32 tensor is among what the node gives."""
    return any(tensor.dtype == torch.float32 for tensor in _tensors(node.meta.get("val")))


def reads_float(node: Node) -> bool:
    """Whether the node is given a float32 tensor."""
    return any(makes_float(source) for source in node.all_input_nodes)


def reads_sizes(node: Node) -> bool:
    """Whether the node asks for the shape of what it is given, whose type does not matter."""
    return getattr(node.target, "__name__", "").startswith(("sym_size", "sym_numel", "sym_stride", "_assert_tensor"))


def is_part(node: Node) -> bool:
    """Whether the node takes one result out of several: it has the type of the node that it reads."""
    return node.target is _operator.getitem


def reason(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    """Why the operator keeps fp32, or None. `mutated`: nodes whose memory is written to."""
    return next((why for rule in _ORDER if (why := rule(node, form, mutated))), None)


def dtype_of(form: HalfFormat) -> torch.dtype:
    return {"fp16": torch.float16, "bf16": torch.bfloat16}[form.name]


def rounded(value: float, form: HalfFormat) -> float:
    """`value` in the format; infinite beyond its range."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype_of(form)))


def constants(node: Node) -> Iterator[float]:
    """The finite numbers among the node's arguments that are values, not sizes, axes or switches."""
    for argument, value in _arguments(node):
        if str(argument.type).removeprefix("Optional[").rstrip("]") in _VALUE_TYPES and _is_number(value):
            yield float(value)


def argument(node: Node, name: str) -> object:
    """The node's argument of that name in the operator's schema, None where it is left out."""
    return next((value for found, value in _arguments(node) if found.name == name), None)


def _not_ours(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return "it is no plain operator"
    if node.target.namespace not in ("aten", "prims"):
        return f"it is an operator of {node.target.namespace}, which may take float32 only"
    return None


def _memory(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    return "it shares memory that is written to" if node in mutated or aliases.written(node) else None


def _made(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    if makes_float(node) and not reads_float(node):
        return "it makes floats of integers or of nothing"
    if not any(True for _ in _tensors(node.meta.get("val"))):
        return "it gives a number"
    return None


def _asked(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    wanted = [value for found, value in _arguments(node) if found.name in ("dtype", "out_dtype")]
    return "the model itself asks for float32 here" if torch.float32 in wanted else None


def _named(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    name = aten_name(node)
    for formats, why, names in _RULES:
        if form.name in formats and name in names:
            return why + _small_eps(node, form)
    if name.endswith(_LOSSES):
        return "a loss sums small differences"
    return next((why for prefix, why in _PREFIXES if name.startswith(prefix)), None)


def _small_eps(node: Node, form: HalfFormat) -> str:
    eps = argument(node, "eps") if isinstance(node.target, torch._ops.OpOverload) else None
    lost = isinstance(eps, float) and eps > 0 and rounded(eps, form) == 0
    return f"; its eps {eps:g} is 0 in {form.name}" if lost else ""


def _constant(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    for value in constants(node):
        near = rounded(value, form)
        if math.isinf(near):
            return f"its constant {value:g} is beyond {form.name}'s {form.largest:g}"
        if abs(near - value) > _CONSTANT_ERROR * abs(value):
            return f"its constant {value:g} is {near:g} in {form.name}"
    return None


def _long_sum(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    name = aten_name(node)
    if name in _POOLS:
        kernel = argument(node, "kernel_size")
        terms = math.prod(kernel) if isinstance(kernel, list | tuple) and len(kernel) > 1 else None
        terms = terms or (kernel if isinstance(kernel, int) else kernel[0]) ** int(name[-2])
    elif name in _SUMS or name in _ADAPTIVE_POOLS:
        terms = _terms(node)
    else:
        return None
    if terms is None:
        return "it sums over a dynamic axis"
    return f"it sums {terms} values" if terms > MOST_SUMMED else None


def _terms(node: Node) -> int | None:
    """How many values one result sums; None where an axis that is summed is dynamic."""
    shape, out = node.args[0].meta["val"].shape, node.meta["val"].shape
    if aten_name(node) in _ADAPTIVE_POOLS:
        axes = range(len(shape) - int(aten_name(node)[-2]), len(shape))
        sizes = [(shape[i], out[i]) for i in axes]
        if not all(isinstance(a, int) and isinstance(b, int) for a, b in sizes):
            return None
        return math.prod(-(-a // b) for a, b in sizes)
    dims = argument(node, "dim")
    dims = range(len(shape)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    sizes = [shape[i] for i in dims]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _after_erf(node: Node, form: HalfFormat, mutated: set[Node]) -> str | None:
    if aten_name(node) in ("add", "sub", "rsub") and any(aten_name(s) in ("erf", "erfc") for s in node.all_input_nodes):
        return "it takes the difference of erf and 1"
    return None


_ORDER: tuple[Callable[[Node, HalfFormat, set[Node]], str | None], ...] = (
    _not_ours, _memory, _made, _asked, _named, _constant, _long_sum, _after_erf,
)  # fmt: skip


@dataclass(frozen=True)
class _Argument:
    name: str
    type: object


def _arguments(node: Node) -> Iterator[tuple[_Argument, object]]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for i, found in enumerate(node.target._schema.arguments):
        described = _Argument(found.name, found.type)
        if i < len(node.args):
            yield described, node.args[i]
        elif found.name in node.kwargs:
            yield described, node.kwargs[found.name]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
