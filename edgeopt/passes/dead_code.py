"""Nodes and stored tensors that nothing reads go. A write in place stays, though nothing reads its result."""

from __future__ import annotations

from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.constants import remove_unused
from edgeopt.passes.rewrite import remove_dead


def run(context: Context) -> Changed:
    return Changed(remove_dead(context.module.graph) + remove_unused(context.module))
