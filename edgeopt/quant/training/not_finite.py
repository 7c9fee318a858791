"""Where NaN and infinity begin: the first layer, by its module path, whose output or gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from edgeopt.program.nodes import module_path, user_line
from edgeopt.quant.training import ranges


def in_outputs(module: GraphModule, tensors: list[torch.Tensor]) -> str | None:
    """The first weight or output in the order of the graph that is not finite, in words; None where all are."""
    with torch.no_grad(), ranges.still(module):
        watcher = _Outputs(module)
        watcher.run(*tensors)
    if watcher.first is None:
        return None
    return _in_words(watcher.first, "the weight" if watcher.first.op == "get_attr" else "the output")


def in_gradients(
    module: GraphModule, tensors: list[torch.Tensor], loss: Callable[[list[torch.Tensor]], torch.Tensor]
) -> str | None:
    """The last output in the order of the graph, the first backwards, whose gradient is not finite, in words."""
    with torch.enable_grad(), ranges.still(module):
        watcher = _Gradients(module)
        outputs = list(watcher.run(*tensors))
        parameters = [p for p in module.parameters() if p.requires_grad]
        torch.autograd.grad(loss(outputs), parameters, allow_unused=True)
    bad = [node for node in module.graph.nodes if node in watcher.bad]
    return _in_words(bad[-1], "the gradient at the output") if bad else None


class _Outputs(Interpreter):
    def __init__(self, module: GraphModule):
        super().__init__(module)
        self.first: Node | None = None

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if self.first is None and n.op not in ("placeholder", "output") and not _all_finite(value):
            self.first = n
        return value


class _Gradients(Interpreter):
    def __init__(self, module: GraphModule):
        super().__init__(module)
        self.bad: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for tensor in torch.utils._pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and n.op != "output":
                tensor.register_hook(lambda gradient, n=n: self._look(n, gradient))
        return value

    def _look(self, node: Node, gradient: torch.Tensor) -> None:
        if not _all_finite(gradient):
            self.bad.add(node)


def _all_finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(t).all())
        for t in torch.utils._pytree.tree_leaves(value)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    )


def _in_words(node: Node, what: str) -> str:
    if node.op == "get_attr":
        return f"{what} '{node.target}'"
    while node.op == "call_module" and isinstance(node.args[0], Node):  # a fake-quantizer: the layer before it
        node = node.args[0]
    name = module_path(node)
    operator = getattr(getattr(node.target, "_schema", None), "name", str(node.target)).rpartition("::")[2]
    line = user_line(node)
    return f"{what} of '{name or node.name}' ({operator}{', ' + line if line else ''})"
