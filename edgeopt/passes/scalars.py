"""Numbers in a graph: written as arguments, or stored as tensors that hold one value; and what sizes a value has."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from edgeopt.passes.changed import Context
from edgeopt.program.stored import tensor_of

_aten = torch.ops.aten
MUL = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.multiply.Tensor}
DIV = {_aten.div.Tensor, _aten.div.Scalar, _aten.true_divide.Tensor, _aten.divide.Tensor}
ADD = {_aten.add.Tensor, _aten.add.Scalar}
SUB = {_aten.sub.Tensor, _aten.sub.Scalar}
NEG = {_aten.neg.default, _aten.negative.default}
_SAME_VALUE = {
    _aten.lift_fresh_copy.default, _aten.detach.default, _aten.detach_.default, _aten.alias.default,
    _aten.clone.default, _aten.contiguous.default, _aten.expand.default, _aten.view.default, _aten.reshape.default,
    _aten.unsqueeze.default,
}  # fmt: skip
_FILLED = {
    _aten.zeros.default: 0, _aten.ones.default: 1, _aten.zeros_like.default: 0, _aten.ones_like.default: 1,
    _aten.new_zeros.default: 0, _aten.new_ones.default: 1,
}  # fmt: skip
_OF_A_NUMBER = {_aten.sqrt.default: lambda x: x**0.5, _aten.rsqrt.default: lambda x: x**-0.5}
_FULL = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2, _aten.scalar_tensor.default: 0}


def number(context: Context, value: Any) -> int | float | bool | None:
    """The one number that `value` is, or that every element of the tensor it names holds; else None.

    Parameters do not count: fine-tuning moves them. Nor does a tensor that the model writes to.
    """
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, Node) or value in context.mutated:
        return None
    while value.target in _SAME_VALUE:
        value = value.args[0]
    if value.op == "get_attr":
        return _stored(context, value)
    if value.target in _OF_A_NUMBER:
        of = number(context, value.args[0])
        return _OF_A_NUMBER[value.target](of) if of is not None and of > 0 else None
    if value.target in _FILLED:
        return _FILLED[value.target]
    if value.target in _FULL:
        fill = value.args[_FULL[value.target]]
        return fill if isinstance(fill, bool | int | float) else None
    return None


def _stored(context: Context, node: Node) -> int | float | bool | None:
    tensor = tensor_of(context.module, node)
    if tensor is None or not tensor.numel() or tensor.is_complex() or _is_parameter(context, node):
        return None
    flat = tensor.reshape(-1)
    same = bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())  # the ends differ in nearly every weight
    return flat[0].item() if same else None


def _is_parameter(context: Context, node: Node) -> bool:
    path, _, name = node.target.rpartition(".")
    return name in context.module.get_submodule(path)._parameters


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that stands for the node's result; None where it gives no single tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def sizes(node: Any) -> tuple[str, ...] | None:
    """The sizes of the node's result as text: comparing symbols by value would add a guard to the graph."""
    value = value_of(node)
    return None if value is None else tuple(str(size) for size in value.shape)


def dtype(node: Any) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype


def dtype_name(kind: torch.dtype | None) -> str:
    """The dtype without torch's own name before it."""
    return str(kind).removeprefix("torch.")


def same_type(a: Any, b: Any) -> bool:
    """Whether two nodes give tensors of one dtype and, as text, one shape."""
    return value_of(a) is not None and dtype(a) == dtype(b) and sizes(a) == sizes(b)


def axis(node: Node, dim: int) -> int:
    """`dim` of the node's result counted from the front."""
    return dim % max(1, len(sizes(node)))
