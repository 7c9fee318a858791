"""What a rule's check is shown of a place: its tensors with shapes, dtypes, constants and where they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.passes.rules_match import Found
from edgeopt.passes.rules_pattern import Pattern
from edgeopt.passes.rules_same import plain
from edgeopt.passes.rules_trace import arguments
from edgeopt.program.nodes import module_path
from edgeopt.program.stored import tensor_of
from edgeopt.spec.profile import Profile


@dataclass(frozen=True)
class Value:
    """A tensor of the model, as an input of the pattern or as what one of its operators gives.

    `operator` is what makes it, such as 'aten.softmax.int', 'placeholder' for an input of the model, 'get_attr' for
    a stored tensor, which `constant` then holds; do not write to it. `shape` has text for a dynamic size, whose range
    is in `smallest` and `largest`. `arguments`: the operator's own, other than tensors, by name. `module`: the path
    of the module that it stands in.
    """

    name: str
    operator: str
    module: str
    shape: tuple[int | str, ...]
    smallest: tuple[int | float, ...]
    largest: tuple[int | float, ...]
    dtype: torch.dtype
    constant: torch.Tensor | None
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Match:
    """A place where the pattern stands. `match['q']` is an input: a Value, or a number where the rule has a scalar.

    `operators` are the pattern's, in its order; `outputs` those whose tensors others read.
    """

    inputs: Mapping[str, Value | int | float]
    operators: tuple[Value, ...]
    outputs: tuple[Value, ...]
    profile: Profile

    def __getitem__(self, name: str) -> Value | int | float:
        return self.inputs[name]


def match_of(found: Found, pattern: Pattern, module: GraphModule, profile: Profile) -> Match:
    """The place in the user's terms."""
    return Match(
        {**{name: _value(node, module) for name, node in found.inputs.items()}, **found.scalars},
        tuple(_value(found.nodes[node], module) for node in pattern.operators if _single(found.nodes[node])),
        tuple(_value(found.nodes[node], module) for node in pattern.outputs),
        profile,
    )


def _single(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _value(node: Node, module: GraphModule) -> Value:
    value = node.meta["val"]
    ranges = [_range(size) for size in value.shape]
    own = arguments(node) if node.op == "call_function" else []
    return Value(
        node.name,
        str(node.target) if node.op == "call_function" else node.op,
        module_path(node),
        tuple(plain(size) for size in value.shape),
        tuple(low for low, _ in ranges),
        tuple(high for _, high in ranges),
        value.dtype,
        tensor_of(module, node),
        {name: constant for name, argument in own if not _reads_tensor(constant := _plain(argument))},
    )


def _plain(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return tuple(_plain(item) for item in argument)
    return plain(argument)


def _reads_tensor(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_reads_tensor(item) for item in argument)
    return isinstance(argument, torch.Tensor | Node)


def _range(size: int | torch.SymInt) -> tuple[int | float, int | float]:
    if isinstance(size, int):
        return size, size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return tuple(int(b) if b.is_finite and b.is_Integer else math.copysign(math.inf, b) for b in _ends(bounds))


def _ends(bounds: Any) -> tuple[Any, Any]:
    return bounds.lower, bounds.upper
