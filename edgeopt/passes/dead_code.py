"""Nodes and stored tensors that nothing reads go. A write in place stays, though nothing reads its result."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from edgeopt.passes import aliases
from edgeopt.passes.changed import Changed
from edgeopt.passes.constants import remove_unused
from edgeopt.spec.profile import Profile


def run(module: GraphModule, profile: Profile) -> Changed:
    del profile
    before = len(module.graph.nodes)
    module.graph.eliminate_dead_code(is_impure_node=_has_effect)
    removed = before - len(module.graph.nodes)
    return Changed(removed + remove_unused(module))


def _has_effect(node: Node) -> bool:
    return node.is_impure() or bool(aliases.written(node))
