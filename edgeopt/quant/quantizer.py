"""The quantizer: walks the graph once and lets the placement's rules annotate it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.program import fakes
from edgeopt.program.nodes import module_path
from edgeopt.quant import annotations, pt2e, rules
from edgeopt.quant.scheme import Scheme


@dataclass(frozen=True)
class Decision:
    """What became of one node that a rule of the placement is about. `reason` says why it stays float."""

    node: str
    rule: str
    operator: str
    path: str  # of the module that called it, '' where the graph does not say
    quantized: bool
    reason: str = ""
    macs: int = 0  # multiply-accumulates of one call at the size that the graph was traced with


class PlacementQuantizer(pt2e.Quantizer):
    """torchao's quantizer for a placement table; `decisions` is filled by `annotate`.

    What `annotations.keep_float` has marked stays float.
    """

    def __init__(self, placement: str, scheme: Scheme):
        self._rules = {name: rule for rule in reversed(rules.PLACEMENTS[placement]) for name in rule.operators}
        self._scheme = scheme
        self.decisions: tuple[Decision, ...] = ()

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        self.decisions = tuple(
            self._decide(node, self._rules[rules.operator(node)])
            for node in model.graph.nodes
            if rules.operator(node) in self._rules
        )
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        """Nothing to check: rules only place what their kernels take."""

    def _decide(self, node: Node, rule: rules.Rule) -> Decision:
        if annotations.is_kept_float(node):
            reason = "kept float by the project"
        else:
            reason = rule.place(node, self._scheme) or ""
        return Decision(node.name, rule.name, rules.operator(node), module_path(node), not reason, reason, macs(node))


def macs(node: Node) -> int:
    """Multiply-accumulates of a convolution, linear or matrix product; 0 for other operators."""
    name, out = rules.operator(node), node.meta.get("val")
    if not isinstance(out, torch.Tensor):
        return 0
    if name in rules.CONVOLUTIONS + rules.TRANSPOSED:
        weight = _sizes(node.args[1])
        transposed = name in rules.TRANSPOSED
        # a transposed convolution does one product for each input element and output it reaches
        elements = _sizes(node.args[0]) if transposed else _sizes(node)
        return _product(elements) * _product(weight[1:])
    if name in ("linear", *rules.MATMULS):
        return _product(_sizes(node)) * _sizes(node.args[0])[-1]
    if name in rules.ATTENTION:  # scores of every query with every key, and as many products with the values
        query, key, value = (_sizes(arg) for arg in node.args[:3])
        return _product(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 0


def _sizes(node: Node) -> list[int]:
    # the hint of a symbolic size is read without int(), which would fix the size for good
    return fakes.sizes(node.meta["val"])


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
