"""In-place operators as their out-of-place twins, where no view of the tensor can tell: relu_ -> relu.

Then the passes that follow and the quantizer see one form of each operator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from edgeopt.passes import aliases
from edgeopt.passes.changed import Changed, Context


def run(context: Context) -> Changed:
    count, declined = 0, []
    graph = context.module.graph
    group = aliases.groups(graph.nodes)
    members: dict[int, dict[Node, None]] = {}
    for node, number in group.items():
        members.setdefault(number, {})[node] = None
    for node in list(graph.nodes):
        twin = _twin(node)
        if twin is None:
            continue
        near = members[group[node.args[0]]]  # all that may share memory with what is written to
        reason = _reason_against(near, node, twin)
        if reason:
            declined.append(f"{node.name}: {reason}")
        else:
            new = _replace(graph, node, twin)
            group[new] = group[node]
            members[group[node]] = {new if other is node else other: None for other in near}
            count += 1
    return Changed(count, tuple(declined))


def _twin(node: Node) -> torch._ops.OpOverload | None:
    """The functional overload of an in-place operator such as add_.Tensor."""
    if not aliases.written(node) or aliases.written(node) != [node.args[0]]:
        return None
    namespace, name = node.target._schema.name.split("::")
    if namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    twin = getattr(getattr(torch.ops.aten, name[:-1], None), node.target._overloadname, None)
    same = twin is not None and [a.name for a in twin._schema.arguments] == [
        a.name for a in node.target._schema.arguments
    ]
    return twin if same else None


def _reason_against(near: Iterable[Node], node: Node, twin: torch._ops.OpOverload) -> str | None:
    target = node.args[0]
    group = aliases.groups(near)
    shared = [other for other in group if group[other] == group[target]]
    if any(other.op != "call_function" for other in shared):
        return "it writes to an input or a stored tensor"
    if any(_is_view(other) for other in shared):
        return "other nodes may share the tensor's memory"
    return None if _same_result(node, twin) else "the twin's result has another dtype or shape"


def _same_result(node: Node, twin: torch._ops.OpOverload) -> bool:
    """Whether `twin` gives what the tensor written to is: half.add_(float) stays half, half.add(float) does not."""
    fakes = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    mode = getattr(node.args[0].meta.get("val"), "fake_mode", None)
    if mode is None:
        return False
    with mode:
        result = twin(*fakes[0], **fakes[1])
    wanted = node.meta["val"]
    return result.dtype == wanted.dtype and [str(s) for s in result.shape] == [str(s) for s in wanted.shape]


def _is_view(node: Node) -> bool:
    return bool(aliases.may_alias(node)) and not aliases.written(node)


def _replace(graph: Graph, node: Node, twin: torch._ops.OpOverload) -> Node:
    target = node.args[0]
    with graph.inserting_before(node):
        new = graph.call_function(twin, node.args, node.kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    target.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and user > new)
    graph.erase_node(node)
    return new
