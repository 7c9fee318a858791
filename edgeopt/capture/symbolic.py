"""autograd Functions with a `symbolic`, the older style of a custom operator: the node that it writes is kept.

torch.export sees what a Function's forward computes. Where the project maps the node that its `symbolic` writes, that
node is found by torch's own older exporter, on one real call, and stands in the graph as `edgeopt::foreign`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf import text_format
from torch.autograd import Function

from edgeopt.capture import eager
from edgeopt.capture.eager import Eager
from edgeopt.errors import first_line
from edgeopt.program import foreign
from edgeopt.program.custom_ops import CustomOps
from edgeopt.program.tracing import quiet

_OPSET = 17
_ONNX = ("", "ai.onnx")


class _Nodes:
    """What the calls of Functions write: a graph's text by the call's key, or why there is none."""

    def __init__(self, custom: CustomOps):
        self._custom = custom
        self._texts: dict[tuple, str | None] = {}
        self.notes: list[str] = []

    def record(self, function: type[Function], args: tuple) -> None:
        try:
            text = self._text(function, args)
        except _Unsuited as why:
            text = None
            self._note(f"the node of {function.__name__} is not kept: {why}")
        key = _key(function, args)
        if self._texts.setdefault(key, text) != text:
            self._texts[key] = None
            self._note(f"the node of {function.__name__} is not kept: its attributes change from call to call")

    def beside(self, function: type[Function], args: tuple, returned: Any) -> Any:
        """While torch.export looks, the results as edgeopt::foreign where there is a node for the call."""
        text = self._texts.get(_key(function, args)) if torch.compiler.is_exporting() else None
        if text is None:
            return returned
        given = [value for value in args if isinstance(value, torch.Tensor)]
        found = foreign.operator()(list(returned) if isinstance(returned, tuple) else [returned], given, text)
        return tuple(found) if isinstance(returned, tuple) else found[0]

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _text(self, function: type[Function], args: tuple) -> str | None:
        graph = _written(function, args)
        nodes = [node for node in graph.node if node.domain not in _ONNX]
        names = [f"{node.domain}::{node.op_type}" for node in nodes]
        unknown = [name for name in names if self._custom.op_of_node(name) is None]
        if not nodes or len(unknown) == len(names):
            return None  # nothing that the project speaks of: the decomposition is what is wanted
        if unknown:
            raise _Unsuited(f"its symbolic writes {unknown[0]} too, which custom_ops does not name")
        own = next((n.op_type for n in graph.node if n.domain in _ONNX and n.op_type != "Constant"), None)
        if own:
            raise _Unsuited(f"its symbolic writes ONNX's own {own} beside {names[0]}; let it write the one node")
        for node in nodes:
            node.name = ""
        return text_format.MessageToString(graph, as_one_line=True)


class _Unsuited(Exception):
    pass


@contextlib.contextmanager
def kept(model: Eager, inputs: dict[str, np.ndarray], custom: CustomOps) -> Iterator[list[str]]:
    """In the block torch.export sees a node of its own for each Function that writes one which the project maps.

    Gives notes, which are complete at once. `inputs` are those of the call that is looked at.
    """
    if not custom.ops:
        yield []
        return
    nodes, calls = _Nodes(custom), []
    with _every_apply(lambda function, args, returned: calls.append((function, _copied(args))) or returned):
        eager.call(model, inputs)
    for function, args in calls:
        nodes.record(function, args)
    with _every_apply(nodes.beside):
        yield nodes.notes


@contextlib.contextmanager
def _every_apply(change: Callable[[type[Function], tuple, Any], Any]) -> Iterator[None]:
    """Every call of a Function that has a symbolic gives `change(function, arguments, results)`."""
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        returned = original.__func__(cls, *args, **kwargs)
        return change(cls, args, returned) if hasattr(cls, "symbolic") and not kwargs else returned

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = original


def _copied(args: tuple) -> tuple:
    return tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)


def _key(function: type[Function], args: tuple) -> tuple:
    """What the node depends on: the Function, the kinds of its tensors, and its other arguments."""
    return (
        function,
        tuple((str(a.dtype), a.dim()) if isinstance(a, torch.Tensor) else (type(a).__name__, repr(a)) for a in args),
    )


def _written(function: type[Function], args: tuple) -> onnx.GraphProto:
    """The graph that torch's older exporter makes of one call, its inputs the call's tensors in order."""
    tensors = [value.detach() for value in args if isinstance(value, torch.Tensor)]
    names = [f"i{k}" for k in range(len(tensors))]
    written = io.BytesIO()
    try:
        with quiet("torch.onnx"):
            torch.onnx.export(
                _Call(function, args), tuple(tensors), written, dynamo=False, opset_version=_OPSET, input_names=names,
                do_constant_folding=False,
            )  # fmt: skip
    except Exception as why:  # symbolic is the user's code
        raise _Unsuited(f"its symbolic fails: {type(why).__name__}: {first_line(why)}") from why
    model = onnx.load_from_string(written.getvalue())
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    graph.doc_string = ""
    del graph.value_info[:]
    if [value.name for value in graph.input] != names:
        raise _Unsuited("it does not read all of its tensors")
    return graph


class _Call(torch.nn.Module):
    """A module that calls a Function with given constants in their places."""

    def __init__(self, function: type[Function], args: tuple):
        super().__init__()
        self._function = function
        self._args = args

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return self._function.apply(*(next(given) if isinstance(a, torch.Tensor) else a for a in self._args))
