"""Which operators compute in the 16-bit format and which keep fp32, so that few casts lie between them.

What has a reason against it keeps fp32. A value that does not fit the format stays fp32, and so does every operator
that reads it, until the values fit again. The rest computes in 16 bits, except where a light operator between islands
would only add casts: it joins them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from edgeopt.passes import aliases, half_rules
from edgeopt.passes.connected import connected
from edgeopt.passes.half_ranges import HEADROOM, Ranges, unfit_weight
from edgeopt.program.nodes import module_path
from edgeopt.program.patterns import aten_name, matches
from edgeopt.program.stored import tensor_of
from edgeopt.spec.half_formats import HalfFormat

JOINED = "it lies between operators that keep fp32"


@dataclass(frozen=True)
class Plan:
    """Node names throughout. `half`: operators that compute in the format. `reasons`: why the others keep fp32.

    `clamped`: attention operators whose mask is cut to the format's range. `weights`: stored tensors that keep fp32
    since they do not fit, and why. `mutated`: nodes whose memory is written to.
    """

    half: frozenset[str]
    reasons: Mapping[str, str]
    clamped: frozenset[str] = frozenset()
    weights: Mapping[str, str] = field(default_factory=dict)
    mutated: frozenset[str] = frozenset()


def float_operators(graph: Graph) -> list[Node]:
    """The operators that read or make float32 tensors, in order; parts of results count with their operator."""
    return [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_module")
        and not half_rules.is_part(node)
        and not half_rules.reads_sizes(node)
        and (half_rules.makes_float(node) or half_rules.reads_float(node))
    ]


def by_rules(module: GraphModule, form: HalfFormat, keep: Iterable[str]) -> dict[str, str]:
    """Operator -> why it keeps fp32 by its kind, or by the user's patterns in `keep`."""
    mutated, keep = aliases.mutated(module.graph), tuple(keep)
    reasons = {}
    for node in float_operators(module.graph):
        pattern = next((p for p in keep if matches(p, node)), None)
        why = f"kept fp32 by '{pattern}'" if pattern else half_rules.reason(node, form, mutated)
        if why:
            reasons[node.name] = why
    return reasons


def unfit_weights(module: GraphModule, form: HalfFormat) -> dict[str, str]:
    """The stored tensors that lose too much in the format, and why."""
    found: dict[str, str | None] = {}
    for node in module.graph.nodes:
        tensor = tensor_of(module, node)
        if tensor is not None and tensor.dtype == torch.float32 and node.target not in found:
            found[node.target] = unfit_weight(tensor, form)
    return {name: why for name, why in found.items() if why}


def plan(
    module: GraphModule, form: HalfFormat, ranges: Ranges, weights: Mapping[str, str], reasons: Mapping[str, str]
) -> Plan:
    """The plan for a graph whose operators `reasons` keep fp32 already; `ranges` are those of its values.

    `weights`: the stored tensors that do not fit, from `unfit_weights`.
    """
    operators = float_operators(module.graph)
    found = dict(reasons)
    for name, why in ranges.missing.items():
        found.setdefault(name, why)
    clamped = _by_ranges(module.graph, form, ranges, weights, found)
    half = {node for node in operators if node.name not in found}
    for node in _join(half):
        half.discard(node)
        found[node.name] = JOINED
    clamped &= {node.name for node in half}
    mutated = frozenset(node.name for node in aliases.mutated(module.graph))
    return Plan(frozenset(node.name for node in half), found, frozenset(clamped), weights, mutated)


def owner(node: Node) -> Node:
    """The operator that made the value: of a part of a result, the operator that gave the whole."""
    while node.target is operator.getitem:
        node = node.args[0]
    return node


def readers(node: Node) -> list[Node]:
    """Who reads the value, with parts of it counted as it."""
    found = []
    for user in node.users:
        found += readers(user) if half_rules.is_part(user) else [user]
    return found


def _by_ranges(
    graph: Graph, form: HalfFormat, ranges: Ranges, weights: Mapping[str, str], found: dict[str, str]
) -> set[str]:
    """Add to `found` what keeps fp32 by its values; the attention operators whose mask is to be clamped."""
    clamped = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            why, reads = weights.get(node.target), f"of its weight '{node.target}': "
        else:
            why, reads = ranges.unfit(node, form), "of what it reads: "
        inside = ranges.attention.get(node.name)
        if inside is not None and inside.largest_score > form.largest / HEADROOM:
            found.setdefault(node.name, f"its scores reach {inside.largest_score:.4g}; {form.name} ends before")
        if why is None:
            continue
        if node.op in ("call_function", "call_module"):
            found.setdefault(owner(node).name, f"its {why}")
        for user in readers(node):
            if _may_clamp(user, node, ranges):
                clamped.add(user.name)
            elif user.op in ("call_function", "call_module"):
                found.setdefault(user.name, reads + why)
    return clamped


def _may_clamp(user: Node, mask: Node, ranges: Ranges) -> bool:
    """Whether `mask` only masks an attention, and no row of it was left empty: then any large number does."""
    if aten_name(user) != half_rules.ATTENTION or half_rules.argument(user, "attn_mask") is not mask:
        return False
    inside = ranges.attention.get(user.name)
    return user.all_input_nodes.count(mask) == 1 and inside is not None and not inside.empty_row


def _join(half: set[Node]) -> list[Node]:
    """The light operators that are better off in fp32, since fewer casts are left then."""
    half, joined = set(half), []
    for _ in range(2):
        groups = [*_light_groups(half), *([node] for node in sorted(half) if _is_light(node))]
        for group in groups:
            members = [node for node in group if node in half]
            touched = _values_at(members)
            before = sum(_needs_cast(value, half) for value in touched)
            half.difference_update(members)
            if sum(_needs_cast(value, half) for value in touched) < before:
                joined += members
            else:
                half.update(members)
    return joined


def _is_light(node: Node) -> bool:
    return aten_name(node) not in half_rules.HEAVY


def _light_groups(half: set[Node]) -> list[list[Node]]:
    """The light operators of `half`, those together that feed each other."""
    return connected(filter(_is_light, sorted(half)), _sources)


def _sources(node: Node) -> Iterator[Node]:
    return map(owner, node.all_input_nodes)


def _values_at(members: list[Node]) -> set[Node]:
    """What the members read and make, as the nodes that hold the values."""
    values = {value for node in members for value in node.all_input_nodes if half_rules.makes_float(value)}
    for node in members:
        values.update(_made_by(node))
    return {value for value in values if value.op != "get_attr"}  # a weight is stored in the type that is asked for


def _made_by(node: Node) -> list[Node]:
    if not isinstance(node.meta.get("val"), list | tuple):
        return [node] if half_rules.makes_float(node) else []
    return [part for user in node.users if half_rules.is_part(user) for part in _made_by(user)]


def _needs_cast(value: Node, half: set[Node]) -> bool:
    is_half = owner(value) in half
    return any((user in half) != is_half for user in value.users if not half_rules.is_part(user))


def islands(graph: Graph, of: Plan) -> list[dict[str, list[str]]]:
    """The connected parts that keep fp32, in order: their modules, operators and reasons."""
    kept = [node for node in float_operators(graph) if node.name not in of.half]
    return [
        {
            "modules": _unique(module_path(node) for node in group),
            "operators": _unique(aten_name(node) or str(node.target) for node in group),
            "why": _unique(of.reasons[node.name] for node in group if of.reasons[node.name] != JOINED),
        }
        for group in connected(kept, _sources)
    ]


def _unique(words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word]
