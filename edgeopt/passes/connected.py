"""Nodes that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node


def connected(nodes: Iterable[Node], near: Callable[[Node], Iterable[Node]]) -> list[list[Node]]:
    """The nodes that `near` joins, directly or through others of them; groups and members in the order of `nodes`."""
    parent = {node: node for node in nodes}

    def root(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = node = parent[parent[node]]
        return node

    for node in parent:
        for other in near(node):
            if other in parent:
                parent[root(node)] = root(other)
    groups: dict[Node, list[Node]] = {}
    for node in parent:
        groups.setdefault(root(node), []).append(node)
    return list(groups.values())
