"""The first node at which two graphs of one model part: where a pass went wrong.

The two name and order their nodes differently. A node of the one may stand for several of the other: the node of its
name and operator, and, at every user that both have, the node that stands in the same argument. It is explained where
it gives the value of any of them. So a rewrite that moves an operator is no fault, and one that changes a value is,
at the first node that nothing explains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule, Node

from edgeopt.program import ExportedGraph
from edgeopt.program.intermediate import Value, comparable, described, operator, values, walk
from edgeopt.program.nodes import module_path, user_line
from edgeopt.runtime.compare import Error, output_error
from edgeopt.spec.manifest import Tolerance


@dataclass(frozen=True)
class Difference:
    """The first node at which a graph leaves another: what it is, where it comes from, both values and the error.

    `wanted` and `found` are the values of the one graph and of the other; `inputs` are those of the node, which agree
    as far as they have a counterpart. `error` is None where the shapes differ.
    """

    node: str
    operator: str
    module: str
    line: str | None
    wanted: Value
    found: Value
    inputs: tuple[Value, ...]
    error: Error | None


def differs(reference: np.ndarray, value: np.ndarray, within: Tolerance) -> Error | None:
    """The error of a node's value where it is not within the tolerance.

    `within.max_abs` bounds the error relative to the node's largest value, however small: an output's tolerance has a
    floor of 1, below which a fault in the middle of a graph would hide until something amplifies it.
    """
    error = output_error([reference], [value])
    if error.mismatches or error.max_rel == np.inf:
        return error
    if within.sqnr_db is not None and error.sqnr_db < within.sqnr_db:
        return error
    return error if within.max_abs is not None and error.max_rel > within.max_abs else None


def first_difference(
    before: ExportedGraph, after: ExportedGraph, inputs: dict[str, np.ndarray], within: Tolerance
) -> Difference | None:
    """The first node of `after` that gives none of the values of `before` that it stands for, or None.

    Nodes without a counterpart of their shape are not judged. The values of `before` are held in memory.
    """
    stands_for = counterparts(before.module, after.module)
    wanted = values(before, inputs, {node for found in stands_for.values() for node in found})
    found: list[Difference] = []

    def compare(node: Node, value: np.ndarray, given: dict[Node, np.ndarray]) -> bool:
        known = [wanted[name] for name in stands_for.get(node.name, ()) if name in wanted]
        known = [array for array in known if array.shape == value.shape]
        errors = [differs(array, value, within) for array in known]
        if not known or any(error is None for error in errors):
            return True
        sources = tuple(described(n.name, given[n]) for n in node.all_input_nodes if n in given)
        found.append(
            Difference(
                node.name, operator(node), module_path(node), user_line(node),
                described(node.name, known[0]), described(node.name, value), sources, errors[0],
            )
        )  # fmt: skip
        return False

    walk(after, inputs, compare)
    return found[0] if found else None


def counterparts(before: GraphModule, after: GraphModule) -> dict[str, tuple[str, ...]]:
    """For nodes of `after`, the names of the nodes of `before` that they may stand for, see the file's docstring."""
    by_name = {node.name: node for node in before.graph.nodes}
    found: dict[str, dict[str, None]] = {}

    def pair(there: Node, here: Node) -> None:
        if comparable(there) and comparable(here):
            found.setdefault(here.name, {})[there.name] = None

    for here in reversed(after.graph.nodes):
        there = by_name.get(here.name)
        if there is None or there.target != here.target:
            known = [by_name[name] for name in found.get(here.name, {})]
            there = next((node for node in known if _plain(node) == _plain(here)), None)
        if there is None:
            continue
        if here.op == "call_function":
            pair(there, here)
        if len(there.all_input_nodes) == len(here.all_input_nodes):
            for theirs, ours in zip(there.all_input_nodes, here.all_input_nodes, strict=True):
                pair(theirs, ours)
    return {name: tuple(names) for name, names in found.items()}


def _plain(node: Node) -> str:
    """The operator's name, the same for one that writes in place and its out-of-place twin."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.removesuffix("_") if schema else f"{node.op} {node.target}"
