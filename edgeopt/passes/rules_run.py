"""A rule as a pass: where its pattern stands the replacement takes its place, elsewhere the record says why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from edgeopt.errors import ProjectError, StageError, first_line
from edgeopt.passes import aliases
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.rewrite import remove_dead
from edgeopt.passes.rules import FusionRule, name_of
from edgeopt.passes.rules_match import Found, Miss, Search
from edgeopt.passes.rules_pattern import Pattern, pattern, same_structure
from edgeopt.passes.rules_place import match_of
from edgeopt.passes.rules_same import described, other_operator, other_value
from edgeopt.passes.rules_trace import Traced, line_of, on_examples, trace
from edgeopt.passes.table import Pass
from edgeopt.program.nodes import module_path, user_line
from edgeopt.program.stored import add_tensor, tensor_of

_KEPT = ("nn_module_stack", "stack_trace", "source_fn_stack")  # what says where a node comes from


@dataclass(frozen=True)
class _Ready:
    """A rule whose functions are known to be usable."""

    rule: FusionRule
    patterns: tuple[Pattern, ...]


@dataclass
class _Run:
    """One rule on one graph. Places of equal shapes share the graphs that were traced for them."""

    ready: _Ready
    context: Context
    traces: dict[Any, Traced | str] = field(default_factory=dict)


def as_pass(name: str, rule: FusionRule) -> Pass:
    """The rule as the pass `rule:NAME`; ProjectError that names the user's line where its functions are unusable."""
    ready = _Ready(rule, tuple(pattern(function, rule) for function in rule.patterns))
    given = on_examples(rule.replacement, rule, 0, "replacement")
    for found in ready.patterns:
        reason = _other_results(given, found.outputs) or _writes(given)
        if reason:
            raise ProjectError(
                f"the replacement '{name_of(rule.replacement)}' is not usable: {reason}",
                where=line_of(rule.replacement), todo=f"return what the pattern '{name_of(found.function)}' returns",
            )  # fmt: skip
    return Pass(f"rule:{name}", "float", "graph", functools.partial(_run, ready), made_by="the project")


def _run(ready: _Ready, context: Context) -> Changed:
    """Replace every place, from the first operator of the graph to the last; places do not overlap."""
    remove_dead(context.module.graph)  # what nobody reads is no reader
    here = _Run(ready, context)
    searches = [Search(spelling, ready.rule, context.module) for spelling in ready.patterns]
    count, declined = 0, []
    for anchor in list(context.module.graph.nodes):
        if anchor._erased or anchor.op != "call_function":
            continue
        done = _at(here, searches, anchor)
        if isinstance(done, str):
            declined.append(f"{_named(anchor)}: {done}")
        else:
            count += done
    if count:
        remove_dead(context.module.graph)
    elif not declined:
        declined.append(_nearest(searches))
    return Changed(count, tuple(declined))


def _at(here: _Run, searches: list[Search], anchor: Node) -> int | str:
    """1 where a spelling of the pattern was replaced, why it was not where one stands here, else 0."""
    reason = None
    for search in searches:
        for found in search.at(anchor):
            difference = _difference(here, search.pattern, found)
            if difference:
                search.missed(found, *difference)
                continue
            reason = _reason_against(here, search.pattern, found) or _replace(here, search.pattern, found)
            if reason is None:
                return 1
    return reason or 0


def _difference(here: _Run, spelling: Pattern, found: Found) -> tuple[Node, str] | None:
    """Where the pattern, traced on the very tensors of the place, says something else than the place does."""
    last = found.nodes[spelling.outputs[0]]
    traced = _on_found(here, spelling.function, found, clean=True)
    if isinstance(traced, str):
        return last, f"the pattern cannot be traced on its tensors: {traced}"
    if not same_structure(spelling.traced, traced):
        return last, "on its tensors the pattern has other operators"
    for ours, wanted in zip(spelling.operators, traced.operators, strict=True):
        given = found.nodes[ours]
        reason = other_operator(wanted, given, swapped=ours in found.swapped)
        if reason:
            return given, reason
    return None


def _on_found(here: _Run, function: Callable[..., Any], found: Found, *, clean: bool) -> Traced | str:
    """The function traced on the tensors of the place, or why that fails."""
    tensors = {name: found.inputs[name].meta["val"] for name in here.ready.rule.tensors}
    described_tensors = (str((v.dtype, v.shape, v.stride(), v.device)) for v in tensors.values())
    key = (function, *described_tensors, *sorted(found.scalars.items()))
    if key not in here.traces:
        mode = next(v.fake_mode for v in tensors.values())
        try:
            here.traces[key] = trace(function, tensors, found.scalars, mode, clean=clean)
        except Exception as why:  # the user's code, on tensors that it may not be meant for
            here.traces[key] = f"{type(why).__name__}: {first_line(why)} ({line_of(function, why)})"
    return here.traces[key]


def _reason_against(here: _Run, spelling: Pattern, found: Found) -> str | None:
    inside = set(found.nodes.values())
    outputs = [found.nodes[node] for node in spelling.outputs]
    for node in sorted(inside - set(outputs)):
        reader = next((user for user in node.users if user not in inside), None)
        if reader is not None:
            return f"the result of {node.name} is also read by {reader.name}"
    both = next((name for name, node in found.inputs.items() if node in inside), None)
    if both is not None:
        return f"{found.inputs[both].name} would be replaced, and is the input '{both}' as well"
    written = next((n for n in (*found.inputs.values(), *sorted(inside)) if n in here.context.mutated), None)
    if written is not None:
        return f"the model writes to the memory of {written.name}"
    before = _before(outputs, inside)
    late = next((node for node in found.inputs.values() if not node < before), None)
    if late is not None:
        return f"{late.name} is computed after one of its results is read"
    return _checked(here, spelling, found)


def _before(outputs: list[Node], inside: set[Node]) -> Node:
    """The node before which the replacement is put: an only output itself, else the first reader of the outputs."""
    if len(outputs) == 1:
        return outputs[0]
    return min((user for node in outputs for user in node.users if user not in inside), default=max(outputs))


def _checked(here: _Run, spelling: Pattern, found: Found) -> str | None:
    """What the user's check says. Raises StageError with the user's file and line where it fails."""
    check = here.ready.rule.check
    if check is None:
        return None
    try:
        reason = check(match_of(found, spelling, here.context.module, here.context.profile))
    except Exception as why:
        where = line_of(check, why)
        raise StageError(f"the check '{name_of(check)}' fails: {type(why).__name__}: {why} ({where})") from why
    if reason is not None and not (isinstance(reason, str) and reason):
        raise StageError(
            f"the check '{name_of(check)}' returned {reason!r} ({line_of(check)}): it returns None, or as text the "
            f"reason against the place"
        )
    return reason


def _replace(here: _Run, spelling: Pattern, found: Found) -> str | None:
    """Put the replacement in; why not, with nothing changed, where its results are not the pattern's."""
    traced = _on_found(here, here.ready.rule.replacement, found, clean=False)
    if isinstance(traced, str):
        return f"the replacement cannot be traced: {traced}"
    outputs = tuple(found.nodes[node] for node in spelling.outputs)
    reason = _other_results(traced, outputs) or _writes(traced)
    if reason:
        return reason
    inside = set(found.nodes.values())
    new = _copied(here.context.module, traced, found, _before(list(outputs), inside), outputs[0])
    for old, value in zip(outputs, traced.outputs, strict=True):
        old.replace_all_uses_with(new[value])
    for node in sorted(inside, reverse=True):
        here.context.module.graph.erase_node(node)
    return None


def _copied(module: GraphModule, traced: Traced, found: Found, before: Node, like: Node) -> dict[Node, Node]:
    """The replacement's nodes put before `before`; their metadata says that they come from where `like` does."""
    new: dict[Node, Node] = {node: found.inputs[name] for name, node in traced.inputs.items()}
    kept = {key: like.meta[key] for key in _KEPT if key in like.meta}
    for node in traced.module.graph.nodes:
        if node.op == "get_attr":
            new[node] = add_tensor(module, "rule_constant", tensor_of(traced.module, node), before, trained=False)
        elif node.op == "call_function":
            with module.graph.inserting_before(before):
                new[node] = module.graph.node_copy(node, new.__getitem__)
            new[node].meta = {**kept, "val": node.meta["val"]}
    return new


def _other_results(traced: Traced, outputs: tuple[Node, ...]) -> str | None:
    """Why the replacement may not stand for the outputs, of the pattern or of the place."""
    if len(traced.outputs) != len(outputs):
        return f"it gives {len(traced.outputs)} tensors, the pattern {len(outputs)}"
    for given, wanted in zip(traced.outputs, outputs, strict=True):
        reason = other_value(wanted.meta["val"], given.meta["val"])
        if reason:
            return f"of the replacement's result {reason}"
    return None


def _writes(traced: Traced) -> str | None:
    group = aliases.groups(traced.module.graph.nodes)
    inputs = {group[node]: name for name, node in traced.inputs.items()}
    for node in traced.operators:
        for target in aliases.written(node):
            if group[target] in inputs:
                return f"the replacement writes to its input '{inputs[group[target]]}' with {described(node)}"
    return None


def _named(node: Node) -> str:
    """A node with the module and the line of the user's model that it comes from."""
    origin = ", ".join(filter(None, (module_path(node), user_line(node))))
    return f"{node.name} ({origin})" if origin else node.name


def _nearest(searches: list[Search]) -> str:
    """How far the pattern came where it came furthest, for a rule that matched nowhere."""
    best = max(searches, key=lambda search: search.nearest.agreed if search.nearest else -1)
    if best.nearest is None:
        spelling = best.pattern
        return f"the model has no {described(spelling.outputs[0])}, the last operator of {name_of(spelling.function)}"
    return _miss(best.pattern, best.nearest)


def _miss(spelling: Pattern, miss: Miss) -> str:
    at = f"at {_named(miss.node)} " if miss.node is not None else ""
    agreed = f"{miss.agreed} of {len(spelling.operators)} operators of {name_of(spelling.function)} agree"
    return f"nearest is {_named(miss.anchor)}, where {agreed}; {at}{miss.reason}"
