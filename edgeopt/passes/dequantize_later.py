"""Dequantize moved behind what only moves values, or chooses among them: op(DQ(q)) = DQ(op(q)).

It is exact, since a dequantize per tensor is the same growing function of every value. Behind a view or a transpose it
is worth it where a quantize follows, which then meets its dequantize and vanishes; behind max pooling, a slice or a
look-up there are fewer values to convert, too. A table of embeddings is then read as integers, a few rows a call, where
the whole of it would else be made float at every call; with a scale a row, the scales are looked up beside the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from edgeopt.passes import fakes, rewrite
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.rewrite import Rule
from edgeopt.program.qdq import is_dequantize, is_quantize
from edgeopt.program.stored import tensor_of

_aten = torch.ops.aten
_AS_MANY = {
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.flatten.using_ints,
    _aten.unflatten.int, _aten.permute.default, _aten.transpose.int, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims, _aten.unsqueeze.default, _aten.pixel_shuffle.default, _aten.clone.default,
    _aten.contiguous.default, _aten.alias.default,
}  # fmt: skip
# torch has these for integers of 8 bits, signed or not; max_pool1d and nearest neighbours it has not for both
_FEWER = {_aten.max_pool2d.default, _aten.max_pool3d.default, _aten.amax.default, _aten.slice.Tensor, _aten.select.int}


def run(context: Context) -> Changed:
    return rewrite.apply(context, _RULES)


def _find_moved(context: Context, node: Node) -> Node | None:
    """The dequantize that stands right before `node`."""
    if node.target not in _AS_MANY | _FEWER:
        return None
    source = node.args[0]
    return source if is_dequantize(source) else None


def _reason_against_moved(context: Context, node: Node, dequantize: Node) -> str | None:
    if "_per_tensor" not in dequantize.target._schema.name:
        return f"{dequantize.name} has a scale for each channel"
    if len(dequantize.users) > 1:
        return f"{dequantize.name} is read by others too"
    if node.target in _AS_MANY and not all(map(is_quantize, node.users)):
        return "what follows reads floats, and as many of them"
    return context.writes(node, dequantize)


def _moved(context: Context, node: Node, dequantize: Node) -> Node:
    integers = fakes.call(node, node.target, (dequantize.args[0], *node.args[1:]), node.kwargs, like=node)
    return fakes.call(node, dequantize.target, (integers, *dequantize.args[1:]), dequantize.kwargs, like=node)


def _find_looked_up(context: Context, node: Node) -> Node | None:
    """The dequantize of an embedding's table."""
    if node.target is not _aten.embedding.default or not is_dequantize(node.args[0]):
        return None
    return node.args[0]


def _reason_against_looked_up(context: Context, node: Node, dequantize: Node) -> str | None:
    if tensor_of(context.module, dequantize.args[0]) is None:
        return "its table is computed"
    if "_per_channel" not in dequantize.target._schema.name:
        return context.writes(node, dequantize)
    zero_points = tensor_of(context.module, dequantize.args[2])
    if dequantize.args[3] != 0 or zero_points is None or bool(zero_points.any()):
        return "its scales are not one a row around 0"
    return context.writes(node, dequantize)


def _looked_up(context: Context, node: Node, dequantize: Node) -> Node:
    make: Callable[..., Node] = lambda target, *args: fakes.call(node, target, args, like=node)  # noqa: E731
    rows = make(_aten.embedding.default, dequantize.args[0], node.args[1])
    if "_per_channel" not in dequantize.target._schema.name:
        return make(dequantize.target, rows, *dequantize.args[1:])
    scales = make(_aten.unsqueeze.default, dequantize.args[1], 1)
    scales = make(_aten.embedding.default, scales, node.args[1])
    return make(_aten.mul.Tensor, make(_aten.to.dtype, rows, torch.float32), scales)


_RULES = (
    Rule("moved", _find_moved, _reason_against_moved, _moved),
    Rule("looked up", _find_looked_up, _reason_against_looked_up, _looked_up),
)
