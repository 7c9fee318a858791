"""Where a node of a graph comes from, in the user's own terms."""

from __future__ import annotations

import re
from pathlib import Path

from torch.fx import Node


def module_path(node: Node) -> str:
    """The path of the innermost module that called `node`, as the user's model names it."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values())) if path), "")


def user_line(node: Node) -> str | None:
    """File and line of the user's code that made `node`, innermost first; None where it is not known."""
    calls = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in calls if "site-packages" not in Path(file).parts]
    return f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else None
