"""Whether two operators, arguments or sizes say the same, and how they are put in messages.

Sizes are compared as text: comparing them by value would add guards to the graph's sizes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from edgeopt.passes.rules_pattern import divides, kind, order
from edgeopt.passes.rules_trace import arguments

_SAME_NUMBER = 1e-6  # relative: what people write of a constant, such as 0.70710678


def other_operator(wanted: Node, given: Node, *, swapped: bool) -> str | None:
    """Why the operator `given` is not `wanted`, traced on the very tensors; None where they are one.

    `swapped`: the first two operands of `given` stand the other way round. Which tensors they are is not compared.
    """
    if kind(wanted) == "reorder" and order(wanted) != order(given):
        return f"it orders the axes as {order(given)}, the pattern as {order(wanted)}"
    if kind(wanted) not in ("reshape", "reorder"):
        theirs = arguments_like(given, wanted)
        if swapped:
            theirs[:2] = theirs[1::-1]
        ours = [(name, value) for name, value in arguments(wanted) if not is_switch(name)]
        for (name, w), (_, g) in zip(ours, theirs, strict=True):
            if not _same_argument(name, w, g, given):
                return f"'{name}' is {said(g)}, the pattern's is {said(w)}"
    return other_value(wanted.meta["val"], given.meta["val"])


def other_value(wanted: Any, given: Any) -> str | None:
    """Why two tensors without data are not of one dtype, shape and device; of lists of them, each with its twin."""
    if isinstance(wanted, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(wanted):
            return "it gives another number of tensors"
        return next(filter(None, (other_value(w, g) for w, g in zip(wanted, given, strict=True))), None)
    for what in ("dtype", "shape", "device"):
        w, g = (_read(value, what) for value in (wanted, given))
        if w != g:
            return f"its {what} is {g}, the pattern's is {w}"
    return None


def _read(value: torch.Tensor, what: str) -> str:
    if what == "shape":
        return "[" + ", ".join(str(size) for size in value.shape) + "]"
    return str(getattr(value, what)).removeprefix("torch.")


def _same_argument(name: str, wanted: Any, given: Any, node: Node) -> bool:
    if is_axis(name):
        return same_axes(wanted, given, axes_of(node))
    if isinstance(wanted, list | tuple) and isinstance(given, list | tuple):
        return len(wanted) == len(given) and all(
            _same_argument(name, w, g, node) for w, g in zip(wanted, given, strict=True)
        )
    if isinstance(wanted, Node) and not _is_size(wanted):
        return isinstance(given, Node)
    return same(wanted, given)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def arguments_like(given: Node, wanted: Node) -> list[tuple[str, Any]]:
    """The arguments of a node as its counterpart in the pattern has them: x / 8 as x * 0.125 where that multiplies."""
    found = [(name, value) for name, value in arguments(given) if not is_switch(name)]
    by = found[1][1] if kind(wanted) == "scale" else None
    if isinstance(by, int | float) and by and divides(given) != divides(wanted):
        return [found[0], (found[1][0], 1 / found[1][1])]
    return found


def is_switch(name: str) -> bool:
    """Whether the argument only says which library may compute: it holds what the process that traced was set to."""
    return name in ("cudnn_enabled", "cudnn_enable")


def is_axis(name: str) -> bool:
    return name in ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")


def axes_of(node: Node) -> int:
    """How many axes the axis arguments of the node are counted over."""
    value = node.meta.get("val")
    if getattr(node.target, "overloadpacket", None) in (torch.ops.aten.unsqueeze, torch.ops.aten.stack):
        return value.dim()
    source = next((n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)), None)
    return source.meta["val"].dim() if source is not None else 0


def same_axes(a: Any, b: Any, rank: int) -> bool:
    """Whether axis numbers mean the same: -1 is the last."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_axes(x, y, rank) for x, y in zip(a, b, strict=True))
    if type(a) is int and type(b) is int and rank:
        return a % rank == b % rank
    return same(a, b)


def same(a: Any, b: Any) -> bool:
    """Whether two constants, or sizes, are one: numbers by value, floats to `_SAME_NUMBER`, sizes by their text."""
    a, b = plain(a), plain(b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) or isinstance(b, bool) or not (_is_number(a) and _is_number(b)):
        return type(a) is type(b) and (a is b or a == b)
    if isinstance(a, float) or isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=_SAME_NUMBER)
    return a == b


def plain(value: Any) -> Any:
    """A size that the graph computes as its number, or its text where it is dynamic."""
    if isinstance(value, Node):
        value = value.meta.get("val", value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        text = str(value)
        try:
            return int(text) if isinstance(value, torch.SymInt) else float(text)
        except ValueError:
            return text
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def said(value: Any) -> str:
    """A value in a message."""
    return value.name if isinstance(value, Node) else repr(plain(value))


def described(node: Node) -> str:
    """A node's operator as people write it."""
    if node.op != "call_function":
        return what_is(node)
    number = " by a number" if kind(node) == "scale" else ""
    return str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target))) + number


def what_is(node: Node) -> str:
    words = {"placeholder": "the input", "get_attr": "the stored tensor"}
    return f"{words.get(node.op, node.op)} {node.target}"
