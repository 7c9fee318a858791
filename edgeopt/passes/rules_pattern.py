"""A pattern made ready to be looked for: its operators, and which of their arguments say the same at every size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from edgeopt.errors import ProjectError
from edgeopt.passes.rules import FusionRule, name_of
from edgeopt.passes.rules_trace import Traced, arguments, gives_tensors, line_of, on_examples

_aten = torch.ops.aten

# Operators that say one thing in several ways: the same elements in another shape, and the same axes in another order.
_RESHAPES = {
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.flatten.using_ints,
    _aten.unflatten.int, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
}  # fmt: skip
_REORDERS = {_aten.transpose.int, _aten.permute.default, _aten.t.default, _aten.mT.default, _aten.numpy_T.default}
_SCALES = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_DIVISIONS = {_aten.div.Tensor, _aten.div.Scalar}
_COMMUTE = {
    _aten.add.Tensor, _aten.mul.Tensor, _aten.maximum.default, _aten.minimum.default, _aten.eq.Tensor,
    _aten.ne.Tensor, _aten.logical_and.default, _aten.logical_or.default, _aten.bitwise_and.Tensor,
    _aten.bitwise_or.Tensor,
}  # fmt: skip
VARIES = object()  # an argument that follows from sizes or from the rule's numbers


@dataclass(frozen=True)
class Wild:
    """An argument that is one of the rule's numbers as it is."""

    name: str


@dataclass(frozen=True)
class Pattern:
    """`arguments` of each operator by name: a Node, a constant, VARIES or a Wild. `outputs` are operators."""

    function: Callable[..., Any]
    traced: Traced
    arguments: dict[Node, list[tuple[str, Any]]]

    @property
    def outputs(self) -> tuple[Node, ...]:
        return self.traced.outputs

    @property
    def operators(self) -> tuple[Node, ...]:
        return self.traced.operators


def pattern(function: Callable[..., Any], rule: FusionRule) -> Pattern:
    """The function as a pattern; ProjectError that names the user's line where it cannot be one."""
    traced, other = (on_examples(function, rule, which, "pattern") for which in (0, 1))
    _require_usable(function, traced, rule)
    if not same_structure(traced, other):
        raise _unusable(function, "it does other things at other sizes", "write one function for each")
    merged = {}
    for node, twin in zip(traced.operators, other.operators, strict=True):
        merged[node] = [
            (name, _merged(a, b, rule))
            for (name, a), (_, b) in zip(arguments(node), arguments(twin), strict=True)
        ]  # fmt: skip
    found = Pattern(function, traced, merged)
    _require_scalars(found, rule)
    return found


def same_structure(one: Traced, other: Traced) -> bool:
    """Whether the two graphs have the same operators on the same operands."""
    if len(one.operators) != len(other.operators) or list(one.inputs) != list(other.inputs):
        return False
    twin = dict(zip(one.inputs.values(), other.inputs.values(), strict=True))
    for a, b in zip(one.operators, other.operators, strict=True):
        operands_a, operands_b = operands(a), operands(b)
        if a.target is not b.target or len(operands_a) != len(operands_b):
            return False
        for x, y in zip(operands_a, operands_b, strict=True):
            if twin.setdefault(x, y) is not y:
                return False
        twin[a] = b
    return len(one.outputs) == len(other.outputs) and all(
        twin.get(x) is y for x, y in zip(one.outputs, other.outputs, strict=True)
    )


def operands(node: Node) -> list[Node]:
    """The tensors that the node reads, stored ones included; sizes are none."""
    return [source for source in node.all_input_nodes if _is_tensor(source)]


def kind(node: Node) -> Any:
    """What is compared of two operators: the same for those that say one thing in several ways."""
    target = node.target
    if target in _RESHAPES:
        return "reshape"
    if target in _REORDERS:
        return "reorder"
    if target in _SCALES and len(node.args) > 1 and not _is_tensor(node.args[1]):
        return "scale"
    return target


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and (value.op != "call_function" or gives_tensors(value))


def commutes(node: Node) -> bool:
    return node.target in _COMMUTE and kind(node) != "scale"


def divides(node: Node) -> bool:
    return node.target in _DIVISIONS


def order(node: Node) -> tuple[int, ...]:
    """The permutation of the axes that a transposing operator makes."""
    rank, target = node.args[0].meta["val"].dim(), node.target
    axes = list(range(rank))
    if target is _aten.transpose.int:
        a, b = (d % rank for d in node.args[1:3])
        axes[a], axes[b] = axes[b], axes[a]
        return tuple(axes)
    if target is _aten.permute.default:
        return tuple(d % rank for d in node.args[1])
    if target is _aten.mT.default:
        return (*axes[:-2], axes[-1], axes[-2])
    return tuple(reversed(axes))


def _require_usable(function: Callable[..., Any], traced: Traced, rule: FusionRule) -> None:
    unused = [name for name, node in traced.inputs.items() if not node.users]
    if unused:
        raise _unusable(function, f"it does not use '{unused[0]}'", "remove it from the inputs of the rule")
    for value in traced.outputs:
        if value not in traced.operators:
            raise _unusable(function, "it returns what it was given", "return what its operators compute")
    if len(set(traced.outputs)) < len(traced.outputs):
        raise _unusable(function, "it returns one tensor twice", "return it once")
    reached = _above(traced.outputs)
    first = _above(traced.outputs[:1])
    if reached - first and not all(_above((output,)) & first for output in traced.outputs[1:]):
        raise _unusable(function, "its outputs have no input in common", "write a rule for each")


def _above(nodes: tuple[Node, ...]) -> set[Node]:
    seen, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return seen


def _merged(a: Any, b: Any, rule: FusionRule) -> Any:
    if isinstance(a, Node):
        return a
    if isinstance(a, list | tuple):
        if not isinstance(b, list | tuple) or len(a) != len(b):
            return VARIES
        return [_merged(x, y, rule) for x, y in zip(a, b, strict=True)]
    if type(a) is type(b) and a == b:
        return a
    return next((Wild(name) for name, given in rule.scalars.items() if given.examples == (a, b)), VARIES)


def _require_scalars(found: Pattern, rule: FusionRule) -> None:
    def wild(value: Any) -> set[str]:
        if isinstance(value, list):
            return {name for item in value for name in wild(item)}
        return {value.name} if isinstance(value, Wild) else set()

    seen = {name for values in found.arguments.values() for _, value in values for name in wild(value)}
    for name in rule.scalars:
        if name not in seen:
            raise _unusable(
                found.function, f"no operator takes the number '{name}' as it is",
                "let the rule take the number that an operator gets, and compute from it in the replacement",
            )  # fmt: skip


def _unusable(function: Callable[..., Any], why: str, todo: str) -> ProjectError:
    return ProjectError(f"the pattern '{name_of(function)}' is not usable: {why}", where=line_of(function), todo=todo)
