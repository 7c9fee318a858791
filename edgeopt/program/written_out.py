"""Operators that an ONNX opset lacks, written out in the form that runtimes look for to fuse them again.

torch's exporter writes attention with the sizes of the key read and re-read (14 nodes for 5), and onnx's own bodies
of Gelu and LayerNormalization are forms that onnxruntime does not recognise: 5 and 9 kernels where the forms below
become one (measured, onnxruntime 1.32). Below opset 18 LayerNormalization and HardSwish are written out too, though
ONNX has them from 17 and 14: opset 17 is what TensorRT 8 reads, whose parser has LayerNormalization from 8.6 only
(onnx-tensorrt's docs/Changelog.md) and no HardSwish in its docs/operators.md for 8.4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import graph, masks
from edgeopt.program.program import ExportedGraph

_aten = torch.ops.aten
_NEGLIGIBLE = -1e30  # a number that stays itself when a score is added to it
_LARGEST_TRIANGLE = 1 << 20  # elements of a causal mask that is stored, a byte each


def for_onnx(program: ExportedGraph, opset: int) -> ExportedGraph:
    """The program with what `opset` lacks written out; the program itself where it holds nothing of the kind.

    Only float32: in 16 bits the squares of a LayerNorm overflow, which the operator avoids (case P02).
    """
    if not any(_writer(node, opset) for node in program.module.graph.nodes):
        return program
    module = graph.shared(program.module)
    for node in list(module.graph.nodes):
        writer = _writer(node, opset)
        if writer:
            with module.graph.inserting_before(node):
                new = writer(_Writing(module, node), *node.args, **node.kwargs)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(is_impure_node=_is_impure)
    module.recompile()
    return dataclasses.replace(program, module=module)


def _is_impure(node: Node) -> bool:
    return node.is_impure() or getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def _writer(node: Node, opset: int) -> Callable[..., Node] | None:
    before, writer, fits = _WRITERS.get(node.target, (0, None, None))
    value = node.meta.get("val")
    is_float = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return writer if opset < before and is_float and fits(node) else None


@dataclasses.dataclass(frozen=True)
class _Writing:
    """Makes the nodes that stand for `node`."""

    module: GraphModule
    node: Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        new = self.node.graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in self.node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        return new

    def stored(self, name: str, value: torch.Tensor) -> Node:
        """A node that reads a new buffer."""
        number, free = 1, name
        while hasattr(self.module, free):
            free, number = f"{name}_{number}", number + 1
        self.module.register_buffer(free, value)
        return self.node.graph.get_attr(free)


def _gelu(write: _Writing, x: Node, *, approximate: str = "none") -> Node:
    if approximate == "none":
        bent = write(_aten.erf.default, write(_aten.div.Tensor, x, math.sqrt(2)))
    else:
        cubic = write(_aten.mul.Tensor, write(_aten.pow.Tensor_Scalar, x, 3.0), 0.044715)
        angle = write(_aten.mul.Tensor, write(_aten.add.Tensor, x, cubic), math.sqrt(2 / math.pi))
        bent = write(_aten.tanh.default, angle)
    return write(_aten.mul.Tensor, write(_aten.mul.Tensor, x, 0.5), write(_aten.add.Tensor, bent, 1.0))


def _hardswish(write: _Writing, x: Node) -> Node:
    return write(_aten.mul.Tensor, x, write(_aten.hardsigmoid.default, x))


def _layer_norm(
    write: _Writing, x: Node, shape: list[int], weight: Node | None = None, bias: Node | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Node:  # fmt: skip
    dims = list(range(-len(shape), 0))
    centred = write(_aten.sub.Tensor, x, write(_aten.mean.dim, x, dims, True))
    variance = write(_aten.mean.dim, write(_aten.pow.Tensor_Scalar, centred, 2), dims, True)
    deviation = write(_aten.sqrt.default, write(_aten.add.Tensor, variance, eps))
    out = write(_aten.div.Tensor, centred, deviation)
    out = out if weight is None else write(_aten.mul.Tensor, out, weight)
    return out if bias is None else write(_aten.add.Tensor, out, bias)


def _attention(
    write: _Writing, query: Node, key: Node, value: Node, attn_mask: Node | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Node:  # fmt: skip
    scores = write(_aten.matmul.default, query, _transposed(write, key))
    scores = _scaled(write, query, scores, scale)
    scores = _causal(write, scores, query, key) if is_causal else _masked(write, scores, attn_mask)
    probabilities = write(_aten.softmax.int, scores, -1)
    if attn_mask is not None and not masks.leaves_a_key(write.module, attn_mask, _meaning(attn_mask)):
        probabilities = _zero_where_wholly_masked(write, probabilities, attn_mask)
    return write(_aten.matmul.default, probabilities, value)


def _transposed(write: _Writing, key: Node) -> Node:
    """The key with its last two axes swapped: a permutation that it comes from is written in its new form."""
    rank = len(key.meta["val"].shape)
    order = None
    if key.target is _aten.permute.default:
        order = [dim % rank for dim in key.args[1]]
    elif key.target is _aten.transpose.int:
        order = list(range(rank))
        a, b = key.args[1] % rank, key.args[2] % rank
        order[a], order[b] = b, a
    if order is None or len(key.users) > 1:
        return write(_aten.transpose.int, key, -2, -1)
    order[-2], order[-1] = order[-1], order[-2]
    return key.args[0] if order == list(range(rank)) else write(_aten.permute.default, key.args[0], order)


def _scaled(write: _Writing, query: Node, scores: Node, scale: float | None) -> Node:
    if scale is not None:
        return scores if scale == 1.0 else write(_aten.mul.Tensor, scores, scale)
    width = query.meta["val"].shape[-1]
    return write(_aten.mul.Tensor, scores, int(width) ** -0.5)


def _meaning(mask: Node) -> masks.Meaning:
    return "allowed" if mask.meta["val"].dtype == torch.bool else "added"


def _masked(write: _Writing, scores: Node, mask: Node | None) -> Node:
    if mask is None:
        return scores
    if _meaning(mask) == "allowed":
        if mask.target is _aten.logical_not.default:
            return write(_aten.masked_fill.Scalar, scores, mask.args[0], -math.inf)
        return write(_aten.where.ScalarOther, mask, scores, -math.inf)
    if mask.target is _aten.where.Scalar and len(mask.users) == 1:
        for on, off, fill in ((mask.args[1], mask.args[2], "off"), (mask.args[2], mask.args[1], "on")):
            if on == 0 and -math.inf < off <= _NEGLIGIBLE:  # what is added is what stands there
                if fill == "off":
                    return write(_aten.where.ScalarOther, mask.args[0], scores, off)
                return write(_aten.masked_fill.Scalar, scores, mask.args[0], off)
    return write(_aten.add.Tensor, scores, mask)


def _causal(write: _Writing, scores: Node, query: Node, key: Node) -> Node:
    """Each query sees the keys up to its own place. Trilu came with opset 14; places are compared instead."""
    lengths = [node.meta["val"].shape[-2] for node in (query, key)]
    if all(isinstance(length, int) for length in lengths) and math.prod(lengths) <= _LARGEST_TRIANGLE:
        allowed = write.stored("causal", torch.ones(lengths, dtype=torch.bool).tril())
    else:
        sizes = [n if isinstance(n, int) else write(_aten.sym_size.int, of, -2)
                 for n, of in zip(lengths, (query, key), strict=True)]  # fmt: skip
        places = [write(_aten.arange.default, size) for size in sizes]
        allowed = write(_aten.ge.Tensor, write(_aten.unsqueeze.default, places[0], 1), places[1])
    return write(_aten.where.ScalarOther, allowed, scores, -math.inf)


def _zero_where_wholly_masked(write: _Writing, probabilities: Node, mask: Node) -> Node:
    """torch's operator gives 0 to a query without keys, where softmax gives NaN."""
    keys = mask if _meaning(mask) == "allowed" else write(_aten.gt.Scalar, mask, -math.inf)
    return write(_aten.where.ScalarOther, write(_aten.any.dim, keys, -1, True), probabilities, 0.0)


def _is_plain_attention(node: Node) -> bool:
    """Without dropout and shared keys, and with a width that is known."""
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)
    plain = not (given.get("dropout_p") or given.get("enable_gqa"))
    width = node.args[0].meta["val"].shape[-1]
    mask = given.get("attn_mask")
    known = mask is None or isinstance(mask, Node) and isinstance(mask.meta.get("val"), torch.Tensor)
    return plain and known and (isinstance(width, int) or isinstance(given.get("scale"), float))


def _always(node: Node) -> bool:
    return True


# operator -> the opset that makes it needless, the writer, and whether it can
_WRITERS: dict[Any, tuple[int, Callable[..., Node], Callable[[Node], bool]]] = {
    _aten.scaled_dot_product_attention.default: (23, _attention, _is_plain_attention),
    _aten.gelu.default: (20, _gelu, _always),
    _aten.layer_norm.default: (18, _layer_norm, _always),
    _aten.hardswish.default: (18, _hardswish, _always),
}
