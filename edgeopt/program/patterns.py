"""Patterns of module paths and operators, as users write them under `keep_float` and `keep_fp32`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from edgeopt.errors import ProjectError
from edgeopt.program.nodes import module_path

NODE = "%"  # '%conv2d_3' is the one operator of that name in the graph, as torch.fx writes it


def aten_name(node: Node) -> str:
    """The aten operator's name without overload and in-place mark: 'conv2d', 'add'; '' for anything else."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = node.target._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def matches(pattern: str, node: Node) -> bool:
    """Whether `pattern` is the node's module ('features.0', which takes what is below it too), its operator, or it."""
    if pattern.startswith(NODE):
        return node.name == pattern[len(NODE) :]
    path = module_path(node)
    return (
        fnmatch.fnmatchcase(path, pattern)
        or fnmatch.fnmatchcase(path, f"{pattern}.*")
        or fnmatch.fnmatchcase(aten_name(node), pattern)
    )


def check(patterns: Iterable[str], module: GraphModule, *, key: str) -> None:
    """ProjectError where a pattern matches nothing, since a misspelt one would silently do nothing."""
    for pattern in patterns:
        if not any(matches(pattern, node) for node in module.graph.nodes if node.op == "call_function"):
            known = sorted({module_path(node) for node in module.graph.nodes} - {""})
            raise ProjectError(
                f"'{pattern}' matches no module path and no operator of the model",
                where=key,
                todo="choose a module path such as " + ", ".join(known[:5]) if known else "choose an operator: linear",
            )
