"""The views that may be taken of a tensor, directly or through other views."""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes import aliases

_aten = torch.ops.aten
BY_STRIDES = {_aten.as_strided.default, _aten.view.dtype}  # what they give depends on how a tensor lies in memory


def views_below(node: Node) -> list[Node]:
    """Every node that may share memory with `node` because it reads it or such a node, in the order found."""
    found: dict[Node, None] = {}
    ahead = [node]
    while ahead:
        at = ahead.pop()
        for user in at.users:
            if user not in found and at in aliases.may_alias(user):
                found[user] = None
                ahead.append(user)
    return list(found)


def make_any_strides(node: Node) -> None:
    """Views of `node` as reshapes, which give the same values however the tensor lies in memory."""
    for view in views_below(node):
        if view.target is _aten.view.default:
            view.target = _aten.reshape.default
