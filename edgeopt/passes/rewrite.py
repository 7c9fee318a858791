"""How a rule of two small functions is applied to a graph: why not here, and the new nodes.

A rule looks at one node and finds what it is about (or nothing); a reason against leaves the place alone and is
reported; else the rule replaces the node. Nodes are visited in order, so that what a replacement makes possible
further down is seen in the same run; the nodes that nothing reads any more go at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from edgeopt.passes import aliases
from edgeopt.passes.changed import Changed, Context


@dataclass(frozen=True)
class Rule:
    """`find(context, node)` gives what `node` is the last operator of, or None.

    `reason_against(context, node, found)` says why the place stays as it is, or None. `replace(context, node, found)`
    makes the new nodes before `node` and returns the one that takes its place.
    """

    name: str
    find: Callable[[Context, Node], Any]
    reason_against: Callable[[Context, Node, Any], str | None]
    replace: Callable[[Context, Node, Any], Node]


def apply(context: Context, rules: Sequence[Rule]) -> Changed:
    """Try the rules in order at every node; the first that finds something settles the node."""
    count, declined = 0, []
    for node in list(context.module.graph.nodes):
        for rule in () if node._erased else rules:
            found = rule.find(context, node)
            if found is None:
                continue
            reason = rule.reason_against(context, node, found)
            if reason:
                declined.append(f"{node.name}: {reason}")
            else:
                _put(node, rule.replace(context, node, found))
                count += 1
            break
    if count:
        remove_dead(context.module.graph)
    return Changed(count, tuple(declined))


def _put(node: Node, new: Node) -> None:
    if "val" not in new.meta:
        new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def remove_dead(graph: Graph) -> int:
    """Erase the nodes that nothing reads and that write to nothing; how many went."""
    before = len(graph.nodes)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or bool(aliases.written(node)))
    return before - len(graph.nodes)
