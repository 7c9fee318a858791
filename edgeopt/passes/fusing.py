"""What the passes have in common that replace several operators by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from edgeopt.passes import duplicates, rewrite
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.rewrite import Rule


def apply(context: Context, rules: Sequence[Rule], *, merging: bool = True) -> Changed:
    """The rules on the graph as it is; where `merging`, once more where x - mean(x) written twice is one node.

    Not the second time alone: what two forms have in common, 0.5 x for one, would be a node that both read. What
    nothing reads goes first, for it is no other user.
    """
    rewrite.remove_dead(context.module.graph)
    first = rewrite.apply(context, rules)
    if not merging or not duplicates.run(context).count:
        return first
    second = rewrite.apply(context, rules)
    return Changed(first.count + second.count, second.declined)


def tied(context: Context, node: Node, inside: Iterable[Node], given: Iterable[Node]) -> str | None:
    """Why the operators `inside`, of which `node` is the last, cannot go: someone else reads or writes them."""
    within = {node, *inside}
    shared = next((n for n in within if n is not node and any(user not in within for user in n.users)), None)
    if shared is not None:
        return f"{shared.name} is used elsewhere"
    return context.writes(*within, *given)
