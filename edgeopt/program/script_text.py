"""A TorchScript graph in words: its operators, what it holds, and its lines. Nothing is run.

TorchScript's own printout numbers its values by the history of the process; here they are operator and number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from edgeopt.program.operators import Names, Weights, short_dtype

_MOST_VALUES = 4


def operators(module: torch.jit.ScriptModule) -> dict[str, int]:
    """How many of each operator the graph has, the most frequent first; bodies of loops and branches count once."""
    kinds = (node.kind() for node in _nodes(module.inlined_graph))
    named = (kind.removeprefix("aten::") for kind in kinds if kind not in ("prim::Constant", "prim::GetAttr"))
    return dict(Counter(named).most_common())


def weights(module: torch.jit.ScriptModule) -> tuple[Weights, ...]:
    """The tensors that the module holds: parameters, buffers, and those that freezing wrote into the graph."""
    held = {id(t): t for t in (*module.parameters(), *module.buffers())}
    for node in _nodes(module.inlined_graph):
        value = _constant(node)
        if isinstance(value, torch.Tensor):
            held.setdefault(value.data_ptr() or id(value), value)
    by_dtype: dict[str, list[torch.Tensor]] = {}
    for tensor in held.values():
        by_dtype.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor)
    made = (
        Weights(
            dtype, len(tensors), sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)
        )
        for dtype, tensors in by_dtype.items()
    )
    return tuple(sorted(made, key=lambda w: -w.bytes))


def lines(module: torch.jit.ScriptModule) -> tuple[str, ...]:
    """The graph, a line an input, an operator and an output; the bodies of loops and branches indented."""
    writer = _Lines()
    graph = module.inlined_graph
    for value in list(graph.inputs())[1:]:  # the first is self
        writer.given(value)
    for node in graph.nodes():
        writer.node(node, "")
    writer.lines.append("output " + ", ".join(writer.word(value) for value in graph.outputs()))
    return tuple(writer.lines)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _constant(node: Any) -> Any:
    return node.output().toIValue() if node.kind() == "prim::Constant" and node.outputsSize() == 1 else None


class _Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names = Names()
        self._words: dict[str, str] = {}

    def given(self, value: Any) -> None:
        self._words[value.debugName()] = f"x{len(self.lines)}"
        self.lines.append(f"input x{len(self.lines)} {value.type()}")

    def word(self, value: Any) -> str:
        return self._words.get(value.debugName(), "self")

    def node(self, node: Any, indent: str) -> None:
        if node.kind() == "prim::Constant":
            self._words[node.output().debugName()] = _value(_constant(node))
            return
        op = node.kind().removeprefix("aten::")
        if op == "prim::ListConstruct":
            self._words[node.output().debugName()] = f"[{', '.join(self.word(v) for v in node.inputs())}]"
            return
        name = self._names.name("", op)
        outputs = list(node.outputs())
        for number, value in enumerate(outputs):
            self._words[value.debugName()] = name if len(outputs) == 1 else f"{name}[{number}]"
        types = ", ".join(str(value.type()) for value in outputs)
        self.lines.append(f"{indent}{name} {types} = {op}({', '.join(self.word(v) for v in node.inputs())})")
        for block in node.blocks():
            for value in block.inputs():
                self._words[value.debugName()] = self._names.name("", "given")
            self.lines.append(f"{indent}  block:")
            for inner in block.nodes():
                self.node(inner, indent + "    ")
            self.lines.append(f"{indent}    return {', '.join(self.word(v) for v in block.outputs())}")


def _value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    kind = short_dtype(str(value.dtype).removeprefix("torch."))
    if value.numel() <= _MOST_VALUES and not value.is_quantized:
        return f"{kind}({', '.join(f'{v:.6g}' for v in value.reshape(-1).tolist())})"
    return f"{kind}[{', '.join(str(n) for n in value.shape)}]"
