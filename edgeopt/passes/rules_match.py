"""Where a pattern stands in a graph, found from an output of it upwards.

torch has two matchers of patterns. fx's SubgraphMatcher does not find `relu(a + b)` in `relu(x + x)`, and neither it
nor that of torch._inductor (private, and 3 s to import) finds `x * sigmoid(x)` in `sigmoid(x) * x`, a reshape to other
sizes, or softmax over axis 2 where the pattern says -1 (torch 2.13); and none says how far it came, which is the first
thing that the author of a rule asks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.passes.rules import FusionRule, TensorInput
from edgeopt.passes.rules_pattern import VARIES, Pattern, Wild, commutes, kind
from edgeopt.passes.rules_same import (
    arguments_like,
    axes_of,
    described,
    is_axis,
    is_switch,
    said,
    same,
    same_axes,
    what_is,
)
from edgeopt.program.stored import tensor_of

_MAX_STEPS = 20_000  # of one place: sums of many terms can be tried in very many orders


@dataclass
class Found:
    """A place: the node of the graph for each operator of the pattern, and what its inputs are."""

    nodes: dict[Node, Node] = field(default_factory=dict)
    inputs: dict[str, Node] = field(default_factory=dict)
    scalars: dict[str, int | float] = field(default_factory=dict)
    swapped: set[Node] = field(default_factory=set)  # operators whose first two operands are exchanged
    sizes: dict[str, str] = field(default_factory=dict)  # of the rule's named dimensions, as text

    def copied(self) -> Found:
        return Found(*(copy.copy(getattr(self, name)) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Miss:
    """The operators that agreed before one did not, and why, at which node of the graph."""

    agreed: int
    anchor: Node
    node: Node | None
    reason: str


_Goals = tuple  # ((pattern value, graph value, words for it), the goals after it)


class Search:
    """The pattern looked for at one node after another; `nearest` is how far the best of them came."""

    def __init__(self, pattern: Pattern, rule: FusionRule, module: GraphModule):
        self.nearest: Miss | None = None
        self.pattern, self._rule, self._module = pattern, rule, module
        self._input_of = {node: name for name, node in pattern.traced.inputs.items()}
        self._anchor: Node | None = None

    def at(self, anchor: Node) -> Iterator[Found]:
        """Every way in which the pattern's first output may be `anchor`; numbers that follow from sizes are open."""
        self._anchor = anchor
        first = self.pattern.outputs[0]
        if kind(anchor) != kind(first):
            return
        stack: list[tuple[_Goals, Found]] = [(((first, anchor, ""), None), Found())]
        steps = 0
        while stack:
            goals, found = stack.pop()
            while goals is not None and steps < _MAX_STEPS:
                (wanted, given, where), goals = goals
                steps += 1
                result = self._step(wanted, given, where, goals, found, stack)
                if isinstance(result, str):
                    self.missed(found, given if isinstance(given, Node) else None, result)
                    break
                goals = result
            else:
                if steps >= _MAX_STEPS:
                    self.missed(found, None, f"its operands can be tried in too many orders (over {_MAX_STEPS})")
                    return
                missing = next((o for o in self.pattern.outputs if o not in found.nodes), None)
                if missing is None:
                    yield found
                    continue
                candidates = self._downwards(missing, found)
                if not candidates:
                    self.missed(found, None, f"nothing here is the pattern's output {described(missing)}")
                stack += [(((missing, node, ""), None), found.copied()) for node in reversed(candidates)]

    def missed(self, found: Found, node: Node | None, reason: str) -> None:
        """Keep the miss where it came further than those before."""
        if self.nearest is None or len(found.nodes) > self.nearest.agreed:
            self.nearest = Miss(len(found.nodes), self._anchor, node, reason)

    def _step(
        self, wanted: Any, given: Any, where: str, goals: _Goals | None, found: Found, stack: list
    ) -> _Goals | None | str:
        """The goals that remain, or why the two differ; further ways are put on the stack."""
        if wanted is VARIES:
            return goals
        if isinstance(wanted, Wild):
            return self._number(wanted.name, given, found) or goals
        if isinstance(wanted, list | tuple):
            if not isinstance(given, list | tuple) or len(given) != len(wanted):
                return f"{where} has other items"
            for w, g in reversed(list(zip(wanted, given, strict=True))):
                goals = ((w, g, where), goals)
            return goals
        if not isinstance(wanted, Node):
            return goals if same(wanted, given) else f"{where} is {said(given)}, the pattern's is {said(wanted)}"
        if not isinstance(given, Node):
            return f"{where or 'an operand'} is {said(given)}, the pattern's is a tensor"
        if wanted in self._input_of:
            return self._input(self._input_of[wanted], given, found) or goals
        if wanted.op == "get_attr":
            return self._constant(wanted, given) or goals
        return self._operator(wanted, given, goals, found, stack)

    def _operator(
        self, wanted: Node, given: Node, goals: _Goals | None, found: Found, stack: list
    ) -> _Goals | None | str:
        if wanted in found.nodes:
            return goals if found.nodes[wanted] is given else f"the pattern reads {described(wanted)} twice"
        if given.op != "call_function":
            return f"it is {what_is(given)}, the pattern has {described(wanted)}"
        if kind(given) != kind(wanted):
            return f"it is {described(given)}, the pattern has {described(wanted)}"
        found.nodes[wanted] = given
        pairs = self._pairs(wanted, given)
        if commutes(wanted):
            other = found.copied()
            other.swapped.add(wanted)
            swapped = [(pairs[0][0], pairs[1][1], ""), (pairs[1][0], pairs[0][1], ""), *pairs[2:]]
            stack.append((_pushed(swapped, goals), other))
        return _pushed(pairs, goals)

    def _pairs(self, wanted: Node, given: Node) -> list[tuple[Any, Any, str]]:
        ours = [(name, value) for name, value in self.pattern.arguments[wanted] if not is_switch(name)]
        theirs = arguments_like(given, wanted)
        if kind(wanted) in ("reshape", "reorder"):  # judged by what they give, on the very tensors
            return [(ours[0][1], theirs[0][1], "")]
        ranks = [n.meta["val"].dim() for n in (wanted, given) if isinstance(n.meta.get("val"), torch.Tensor)]
        pairs = []
        for (name, w), (_, g) in zip(ours, theirs, strict=True):
            if is_axis(name) and w is not VARIES and not isinstance(w, Wild):
                if len(set(ranks)) < 2 and same_axes(w, g, axes_of(given)):
                    continue
                if len(set(ranks)) == 2:  # a pattern of any rank: judged on the very tensors
                    continue
            pairs.append((w, g, f"'{name}'" if name else "its index"))
        return pairs

    def _input(self, name: str, given: Node, found: Found) -> str | None:
        if name in found.inputs:
            same_node = found.inputs[name] is given
            return None if same_node else f"'{name}' would be {given.name} here, and {found.inputs[name].name} there"
        value = given.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return f"'{name}' would be {given.name}, which is no tensor"
        reason = _unlike(name, self._rule.tensors[name], value, found.sizes)
        if reason is None:
            found.inputs[name] = given
        return reason

    def _number(self, name: str, given: Any, found: Found) -> str | None:
        if isinstance(given, bool) or not isinstance(given, int | float):
            return f"the number '{name}' would be {said(given)}"
        whole = isinstance(self._rule.scalars[name].examples[0], int)
        if whole and not float(given).is_integer():
            return f"the number '{name}' would be {given!r}, the rule takes whole numbers"
        value = int(given) if whole else float(given)
        if not same(found.scalars.setdefault(name, value), value):
            return f"the number '{name}' would be {value!r} here, and {found.scalars[name]!r} there"
        return None

    def _constant(self, wanted: Node, given: Node) -> str | None:
        ours, theirs = tensor_of(self.pattern.traced.module, wanted), tensor_of(self._module, given)
        if theirs is None:
            return f"it is {what_is(given)}, the pattern has a constant"
        equal = ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
        return None if equal else f"the constant {given.target} has other values than the pattern's"

    def _downwards(self, output: Node, found: Found) -> list[Node]:
        """The nodes that may be a further output: reached by its operators from what is known of it already."""
        known = {**found.nodes, **{self.pattern.traced.inputs[name]: node for name, node in found.inputs.items()}}
        paths: list[tuple[Node, ...]] = [(output,)]
        for path in paths:
            if path[-1] in known:
                break
            paths += [(*path, source) for source in path[-1].all_input_nodes]
        else:
            return []
        reached = [known[path[-1]]]
        for step in reversed(path[:-1]):
            users = (user for node in reached for user in node.users if kind(user) == kind(step))
            reached = list(dict.fromkeys(users))
        taken = set(found.nodes.values())
        return [node for node in reached if node not in taken]


def _pushed(pairs: list[tuple[Any, Any, str]], goals: _Goals | None) -> _Goals | None:
    for pair in reversed(pairs):
        goals = (pair, goals)
    return goals


def _unlike(name: str, given: TensorInput, value: torch.Tensor, sizes: dict[str, str]) -> str | None:
    """Why a tensor is not what the rule takes; `sizes` are those of named dimensions, and are added to."""
    if given.dtype is None and not value.dtype.is_floating_point or given.dtype not in (None, value.dtype):
        return f"'{name}' is {_dtype(value)}, the rule takes {str(given.dtype or 'floats').removeprefix('torch.')}"
    wanted = [size for size in given.shape if size is not ...]
    open_rank = len(wanted) < len(given.shape)
    if value.dim() < len(wanted) or not open_rank and value.dim() > len(wanted):
        return f"'{name}' has {value.dim()} dimensions, the rule's {'at least ' * open_rank}{len(wanted)}"
    for size, here in zip(reversed(wanted), reversed([str(s) for s in value.shape]), strict=False):
        known = str(size) if isinstance(size, int) else sizes.setdefault(size, here)
        if known != here:
            what = "the rule's" if isinstance(size, int) else f"'{size}', which is elsewhere"
            return f"'{name}' has the size {here} for {what} {known}"
    return None


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
