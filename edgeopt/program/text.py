"""A graph as lines of text that stay the same where the graph does: what `inspect --diff` compares.

One line an operator: its name, dtype and shape, and its arguments. Names are module path and operator, numbered
where they repeat within a module; sizes of dynamic axes stand under the user's names; weights stand by name in the
line that reads them; sizes and items of lists stand where they are read, and so does a dequantization, as
`real(integers, scale, zero point)`. What a graph calls its own nodes and symbols does not appear: it changes whenever
a graph is exported again.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from edgeopt.program import node_words
from edgeopt.program.operators import Names, short_dtype
from edgeopt.program.program import ExportedGraph, Signature

_NO_MEANING = ("cudnn_enable", "cudnn_enabled")  # which library computes it, not what
_MOST_VALUES = 4  # of a stored tensor, shown instead of its name, which export invents


def lines(program: ExportedGraph) -> tuple[str, ...]:
    """The graph, a line an input, an operator and an output."""
    return _Lines(program).all()


class _Lines:
    def __init__(self, program: ExportedGraph):
        self._module: GraphModule = program.module
        self._signature: Signature = program.signature
        self._symbols: dict[str, str] = {}
        self._words: dict[Node, str] = {}  # how a node is written where it is read
        self._names = Names()
        self._lines: list[str] = []
        self._sizes: dict[Any, str] = {}
        self._values: dict[Node, Any] = {}  # what each gives, without data

    def all(self) -> tuple[str, ...]:
        nodes = self._module.graph.nodes
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, self._signature.inputs, strict=True):
            self._words[node] = spec.name
            self._values[node] = node.meta.get("val")
            self._learn(node.meta.get("val"), spec.shape)
            self._lines.append(f"input {spec.name} {short_dtype(spec.dtype)}{_shape(spec.shape)}")
        for node in nodes:
            if node.op == "get_attr":
                self._words[node] = self._stored(node)
                self._values[node] = node.meta["val"] if "val" in node.meta else _held(self._module, node.target)
            elif node.op in ("call_function", "call_module", "call_method"):
                self._call(node)
            elif node.op == "output":
                returned = [node.args[0]] if isinstance(node.args[0], Node) else node.args[0]
                for name, value in zip(self._signature.output_names, returned, strict=True):
                    self._lines.append(f"output {name} = {self._word(value)}")
        return tuple(self._lines)

    def _learn(self, value: Any, shape: tuple[int | str, ...]) -> None:
        """The symbols that stand for the axes of an input."""
        for size, axis in zip(getattr(value, "shape", ()), shape, strict=False):
            if isinstance(size, torch.SymInt) and isinstance(axis, str) and re.fullmatch(r"\w+", str(size)):
                self._symbols.setdefault(str(size), axis)

    def _call(self, node: Node) -> None:
        value = self._values[node] = self._result(node)
        if node_words.is_item(node):
            self._words[node] = f"{self._word(node.args[0])}[{self._word(node.args[1])}]"
            return
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            self._words[node] = self._size(value)
            return
        op = node_words.operator_name(node)
        if op.startswith("dequantize_per"):
            self._words[node] = f"real({', '.join(self._word(a) for a in node.args[:3])})"
            return
        name = self._words[node] = self._names.name(node_words.path_of(node), op)
        self._lines.append(f"{name} {self._type(value)} = {op}({', '.join(self._arguments(node))})")

    def _result(self, node: Node) -> Any:
        """What the node gives, without data: as it says, or found out, since quantizers leave it to the next export."""
        if "val" in node.meta or not callable(node.target):
            return node.meta.get("val")
        given = {n: self._values.get(n) for n in node.all_input_nodes}
        mode = next((v.fake_mode for v in given.values() if isinstance(v, FakeTensor)), None)
        if mode is None:
            return None
        real = {n: v for n, v in given.items() if isinstance(v, torch.Tensor) and not isinstance(v, FakeTensor)}
        given.update({n: mode.from_tensor(v, static_shapes=True) for n, v in real.items()})
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given.get)
        with mode, torch.no_grad(), contextlib.suppress(Exception):
            return node.target(*args, **kwargs)
        return None

    def _arguments(self, node: Node) -> list[str]:
        if not isinstance(node.target, torch._ops.OpOverload):
            named = [f"{k}={self._word(v)}" for k, v in node.kwargs.items()]
            return [*(self._word(value) for value in node.args), *named]
        words = []
        for at, argument in enumerate(node.target._schema.arguments):
            given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            left_out = argument.has_default_value() and _same(given, argument.default_value)
            if left_out or argument.name in _NO_MEANING:
                continue
            word = self._word(given)
            plain = at == 0 or at == 1 and isinstance(given, Node)
            words.append(word if plain else f"{argument.name}={word}")
        return words

    def _word(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._words.get(value, value.name)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self._word(item) for item in value) + "]"
        if isinstance(value, float):
            return _rounded(value)
        if isinstance(value, torch.dtype):
            return short_dtype(str(value).removeprefix("torch."))
        return str(value).removeprefix("torch.")

    def _stored(self, node: Node) -> str:
        value = _held(self._module, node.target)
        if not isinstance(value, torch.Tensor):
            return str(node.target)
        if "." not in node.target and value.numel() <= _MOST_VALUES and not value.is_quantized:
            shown = ", ".join(_rounded(v) for v in value.detach().reshape(-1).tolist())
            return f"{short_dtype(str(value.dtype).removeprefix('torch.'))}({shown})"
        return f"{node.target} {self._type(value)}"

    def _type(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            sizes = [self._size(n) for n in value.shape]
            return f"{short_dtype(str(value.dtype).removeprefix('torch.'))}[{', '.join(sizes)}]"
        if isinstance(value, list | tuple):
            return "(" + ", ".join(self._type(item) for item in value) + ")"
        return "?" if value is None else type(value).__name__

    def _size(self, size: Any) -> str:
        """A size with the user's names for axes; symbols that are no axis are numbered as they appear."""
        if isinstance(size, int):
            return str(size)
        text = str(size)
        if text not in self._sizes:
            self._sizes[text] = re.sub(r"\b[a-z]+\d+\b", lambda m: self._symbol(m.group()), text)
        return self._sizes[text]

    def _symbol(self, symbol: str) -> str:
        known = len(set(self._symbols.values()) - set(self._signature.axes))
        return self._symbols.setdefault(symbol, f"size_{known}")


def _held(module: GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _shape(shape: tuple[int | str, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _same(given: Any, default: Any) -> bool:
    if isinstance(given, list | tuple) and isinstance(default, list | tuple):
        return list(given) == list(default)
    return not isinstance(given, Node) and type(given) is type(default) and given == default


def _rounded(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
