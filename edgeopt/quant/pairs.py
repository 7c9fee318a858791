"""A calibrated program run in two ways at once, node by node: as float, and as its integers will be.

The values of both that later nodes still need are in memory, for all batches; a value goes with its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import graph, stored
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import observers

Pair = tuple[Any, Any]  # a node's value in the float program, and in the integer one as simulated


class Walk:
    """The values so far: `values[node]` holds a Pair a batch. `at(walk, node)` is called before a node is run and
    may change the weights of `module`, a program with observers; the float side keeps those that it began with.
    """

    def __init__(self, module: GraphModule, batches: Sequence[Sequence[torch.Tensor]]):
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.module, self.count = module, len(batches)
        self.values: dict[Node, list[Pair]] = {
            node: [(batch[i], batch[i]) for batch in batches] for i, node in enumerate(inputs)
        }
        self._last_use = graph.last_uses(module.graph.nodes)

    def run(
        self,
        label: str,
        *,
        before: Callable[[Walk, Node], None] | None = None,
        after: Callable[[Walk, Node], None] | None = None,
        progress: Progress = SILENT,
    ) -> None:
        """Through the whole graph, without gradients."""
        nodes = self.module.graph.nodes
        with torch.no_grad(), progress.bar(label, len(nodes)) as advance:
            for node in nodes:
                advance(1)
                if node.op in ("placeholder", "output"):
                    continue
                if before:
                    before(self, node)
                self._run(node)
                if after:
                    after(self, node)

    def refresh(self, node: Node) -> None:
        """Round a stored tensor anew at its observer `node`, after either has changed; the float side stays."""
        observer = self.module.get_submodule(node.target)
        rounded = observers.rounded(observer, stored.tensor(self.module, node.args[0]))
        self.values[node] = [(exact, rounded) for exact, _ in self.values[node]]

    def _run(self, node: Node) -> None:
        if node.op == "get_attr" or all(source.op == "get_attr" for source in node.all_input_nodes):
            self.values[node] = [self._value(node, 0)] * self.count
            self._drop(node)
            return
        self.values[node] = []
        for k in range(self.count):
            self.values[node].append(self._value(node, k))
            for used in self._last_use.get(node, ()):
                self.values[used][k] = None
        self._drop(node)

    def _drop(self, node: Node) -> None:
        for used in self._last_use.get(node, ()):
            self.values.pop(used, None)

    def _value(self, node: Node, k: int) -> Pair:
        if node.op == "get_attr":
            held = stored.tensor(self.module, node)
            return held.clone(), held  # the float program keeps what the other one gets changed
        if node.op == "call_module":
            exact, rounded = self.values[node.args[0]][k]
            return exact, observers.rounded(self.module.get_submodule(node.target), rounded)
        results = []
        for side in (0, 1):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n, s=side: self.values[n][k][s])
            results.append(node.target(*args, **kwargs))
        return results[0], results[1]


def own_bias(node: Node) -> Node | None:
    """The stored bias that only `node`, a convolution or linear, uses; None where there is none."""
    if len(node.args) < 3:
        return None
    bias = node.args[2]
    while isinstance(bias, Node) and bias.op == "call_module" and len(bias.users) == 1:
        bias = bias.args[0]
    alone = isinstance(bias, Node) and bias.op == "get_attr" and len(bias.users) == 1
    return bias if alone else None
