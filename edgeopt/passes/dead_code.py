"""Nodes and stored tensors that nothing reads go. A write in place stays, though nothing reads its result."""

from __future__ import annotations

from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.rewrite import remove_dead
from edgeopt.program import graph


def run(context: Context) -> Changed:
    return Changed(remove_dead(context.module.graph) + graph.remove_unused(context.module))
