"""Whose memory a tensor is: a result that was a tensor of its own must not become the caller's input or a weight."""

from __future__ import annotations

from torch.fx import Node

from edgeopt.passes import aliases
from edgeopt.passes.views import views_below


def returned(node: Node) -> bool:
    """Whether the program returns the node's result or a view of it."""
    return any(user.op == "output" for at in (node, *views_below(node)) for user in at.users)


def handed_out(node: Node, source: Node) -> str | None:
    """The reason not to put `source` in the place of `node`, where the caller would get what is not its own."""
    return "it is returned, and would be what the caller holds" if returned(node) and lent(source) else None


def lent(node: Node) -> bool:
    """Whether the node's result may be, or be a view of, an input or a stored tensor."""
    seen, ahead = {node}, [node]
    while ahead:
        at = ahead.pop()
        if at.op in ("placeholder", "get_attr"):
            return True
        ahead += [source for source in aliases.may_alias(at) if source not in seen]
        seen.update(ahead)
    return False
