"""What happens inside a graph: the values of its nodes, seen one by one, or made outputs of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.fx import GraphModule, Node

from edgeopt.program import graph
from edgeopt.program.program import ExportedGraph, Signature
from edgeopt.spec.manifest import TensorSpec

See = Callable[[Node, np.ndarray, dict[Node, np.ndarray]], bool]


@dataclass(frozen=True)
class Value:
    """The tensor at a node, in words: shape, dtype, lowest and highest finite value."""

    node: str
    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float


def values(program: ExportedGraph, inputs: dict[str, np.ndarray], names: Iterable[str]) -> dict[str, np.ndarray]:
    """The values of the named nodes for named inputs, copied; nodes that give no single tensor are left out."""
    wanted, found = set(names), {}

    def keep(node: Node, value: np.ndarray, given: dict[Node, np.ndarray]) -> bool:
        if node.name in wanted:
            found[node.name] = value
        return True

    walk(program, inputs, keep)
    return found


def walk(program: ExportedGraph, inputs: dict[str, np.ndarray], see: See) -> None:
    """Run the graph and show every computed tensor, copied: `see(node, value, live values)`, until that says no."""
    _Walk(program.module, see).run(*graph.to_tensors(program.signature, inputs))


def exposed(program: ExportedGraph, nodes: Iterable[Node]) -> ExportedGraph:
    """The program with the values of `nodes` as further outputs, named `at_NODE`, after its own.

    A value that another tensor may share memory with is copied, so that a later write does not show in it.
    """
    module = graph.copied(program.module)
    by_name = {node.name: node for node in module.graph.nodes}
    output = module.graph.output_node()
    chosen = [by_name[node.name] for node in nodes]
    added = []
    for node in chosen:
        with module.graph.inserting_after(node):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {"val": node.meta["val"]}
        added.append(copy)
    output.args = ((*output.args[0], *added),)
    tell_outputs(module)
    module.graph.lint()
    module.recompile()
    specs = tuple(_spec(node, program.signature, number) for number, node in enumerate(chosen))
    signature = dataclasses.replace(
        program.signature, outputs=(*program.signature.outputs, *specs),
        output_structure={
            "kind": "tuple",
            "items": [{"kind": "tensor", "index": i} for i in range(len(program.signature.outputs) + len(specs))],
        },
    )  # fmt: skip
    changed = dataclasses.replace(program, module=module, signature=signature)
    calls = tuple(dataclasses.replace(c, outputs=graph.run(changed, c.inputs)) for c in program.reference)
    return dataclasses.replace(changed, reference=calls)


def tell_outputs(module: GraphModule) -> None:
    """The number of outputs, where the graph's own code puts them into the structure that torch.export noted."""
    codegen = module.graph._codegen
    if isinstance(codegen, torch.fx.graph._PyTreeCodeGen):
        count = len(module.graph.output_node().args[0])
        _, spec = torch.utils._pytree.tree_flatten(tuple(range(count)))
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=spec)


def output_name(node: Node) -> str:
    """The name of the output that `exposed` gives a node."""
    return f"at_{node.name}"


def operator(node: Node) -> str:
    """The operator as people write it, such as aten.conv2d."""
    return str(node.target).removesuffix(".default")


def described(name: str, value: np.ndarray) -> Value:
    """The value in words; 0 to 0 where nothing in it is finite."""
    finite = value[np.isfinite(value)] if value.dtype.kind in "fc" else value
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return Value(name, value.shape, value.dtype.name, low, high)


def comparable(node: Node) -> bool:
    """Whether the node computes a single tensor of real numbers, other than a stored one."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and not value.dtype.is_complex


class _Walk(torch.fx.Interpreter):
    def __init__(self, module: GraphModule, see: See):
        super().__init__(module)
        self._see = see
        self._last: dict[Node, np.ndarray] = {}

    def run(self, *tensors: torch.Tensor) -> None:
        with torch.no_grad():
            try:
                super().run(*tensors)
            except _Enough:
                return

    def run_node(self, node: Node) -> object:
        value = super().run_node(node)
        if isinstance(value, torch.Tensor) and not value.is_complex() and node.op in ("call_function", "placeholder"):
            array = _array(value)
            self._last[node] = array
            if comparable(node) and not self._see(node, array, self._last):
                raise _Enough
        for source in self.user_to_last_uses.get(node, ()):  # as the interpreter frees its own values
            self._last.pop(source, None)
        return value


class _Enough(Exception):
    """Nothing further is to be seen."""


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    value = value.float() if value.dtype is torch.bfloat16 else value
    return np.array(value.numpy(), copy=True, order="C")


def _spec(node: Node, signature: Signature, number: int) -> TensorSpec:
    """The node as an output: sizes that are an axis by its name, other symbolic sizes by a name of their own."""
    value = node.meta["val"]
    symbols = _axis_symbols(node, signature)
    shape = tuple(
        size if isinstance(size, int) else symbols.get(str(size), f"at_{number}_{i}")
        for i, size in enumerate(value.shape)
    )
    return TensorSpec(name=output_name(node), dtype=str(value.dtype).removeprefix("torch."), shape=shape)


def _axis_symbols(node: Node, signature: Signature) -> dict[str, str]:
    placeholders = [n for n in node.graph.nodes if n.op == "placeholder"]
    return {
        str(size): name
        for holder, spec in zip(placeholders, signature.inputs, strict=True)
        for size, name in zip(holder.meta["val"].shape, spec.shape, strict=True)
        if isinstance(name, str) and not isinstance(size, int)
    }
