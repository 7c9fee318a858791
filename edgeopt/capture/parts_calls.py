"""How the model calls a module of its own: tensors taken out of the structure around them, and calls recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeopt.capture import script
from edgeopt.capture.declined import Declined
from edgeopt.capture.eager import Eager, call
from edgeopt.errors import ModelError
from edgeopt.program.reexport import equal

# ('tensor', index, dtype, rank), ('constant', value, type), ('tuple' or 'list', items), ('dict', ((key, item), ...))
Key = tuple


@dataclass(frozen=True)
class Recorded:
    """One call of a module: the structure of its arguments (args, kwargs) and of what it returned, and the tensors.

    `wrote` is true where a tensor that it was given is another one after the call. `declined` says why the call
    cannot be written as TorchScript source; the other fields are empty then.
    """

    takes: Key = ()
    inputs: tuple[torch.Tensor, ...] = ()
    gives: Key = ()
    outputs: tuple[torch.Tensor, ...] = ()
    wrote: bool = False
    declined: str | None = None


def flatten(value: Any) -> tuple[Key, list[torch.Tensor]]:
    """The structure of `value` and its tensors; equal structures call for the same operator.

    Tuples, lists, dicts with text as keys, None, and Python's numbers and text. Declined for anything else, sizes of
    dynamic axes as numbers among it.
    """
    tensors: list[torch.Tensor] = []
    return _flatten(value, tensors), tensors


def _flatten(value: Any, tensors: list[torch.Tensor]) -> Key:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1, str(value.dtype).removeprefix("torch."), value.ndim)
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return ("constant", value, type(value).__name__)  # 1, 1.0 and True are equal and no one value
    if type(value) in (tuple, list):
        return (type(value).__name__, tuple(_flatten(item, tensors) for item in value))
    if type(value) is dict and all(type(key) is str for key in value):
        return ("dict", tuple((key, _flatten(item, tensors)) for key, item in value.items()))
    kind = "a size of a dynamic axis as a number" if isinstance(value, torch.SymInt) else f"a {type(value).__name__}"
    raise Declined(f"it takes or gives {kind}, for which a scripted part has no form")


def rebuild(key: Key, tensors: Iterable[torch.Tensor]) -> Any:
    """The value that `flatten` took apart, with these tensors."""
    given = list(tensors)

    def build(key: Key) -> Any:
        kind, inner = key[:2]
        if kind == "tensor":
            return given[inner]
        if kind == "constant":
            return inner
        if kind == "dict":
            return {name: build(item) for name, item in inner}
        return tuple(map(build, inner)) if kind == "tuple" else list(map(build, inner))

    return build(key)


def source(takes: Key, gives: Key, *, copied: bool) -> str:
    """A `forward` of positional tensors to a flat tuple, in TorchScript, that calls `self.inner` in this form.

    `copied` where what the module returns may share memory with what it was given.
    """
    args, kwargs = takes[1]
    count = sum(1 for _ in _paths(takes, ""))
    passed = [_text(item) for item in args[1]] + [f"{name}={_text(item)}" for name, item in kwargs[1]]
    returned = "".join(f"{path}{'.clone()' if copied else ''}, " for path in _paths(gives, "out"))
    names = ", ".join(["self", *(f"x{i}" for i in range(count))])
    return f"def forward({names}):\n    out = self.inner({', '.join(passed)})\n    return ({returned})\n"


def _text(key: Key) -> str:
    kind, inner = key[:2]
    if kind == "tensor":
        return f"x{inner}"
    if kind == "constant":
        return repr(inner)
    if kind == "dict":
        return "{" + ", ".join(f"{name!r}: {_text(item)}" for name, item in inner) + "}"
    items = "".join(f"{_text(item)}, " for item in inner)
    return f"({items})" if kind == "tuple" else f"[{items}]"


def _paths(key: Key, path: str) -> Iterator[str]:
    """The expression that reaches each tensor, in the order in which `flatten` finds them."""
    kind, inner = key[:2]
    if kind == "tensor":
        yield path
    elif kind == "dict":
        for name, item in inner:
            yield from _paths(item, f"{path}[{name!r}]")
    elif kind != "constant":
        for i, item in enumerate(inner):
            yield from _paths(item, f"{path}[{i}]")


def record(model: Eager, paths: Iterable[str], tried: list[dict[str, np.ndarray]]) -> dict[str, list[Recorded]]:
    """The calls that the model makes of the modules at `paths`, while it answers each of the inputs `tried`.

    Inputs on which the model fails give no calls: the guard has said what must work.
    """
    module = model.fresh()
    calls: dict[str, list[Recorded]] = {path: [] for path in paths}
    for path, found in calls.items():
        replace_forward(module, path, lambda forward, found=found: _listening(forward, found))
    for inputs in tried:
        before = {path: len(found) for path, found in calls.items()}
        try:
            call(model, inputs, module=module)
        except ModelError:
            for path, found in calls.items():
                del found[before[path] :]
    return calls


def replace_forward(root: nn.Module, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give the module at `path` the forward `make(its own)`; a scripted module, which takes none, is replaced."""
    module = root.get_submodule(path)
    if not script.is_script(module):
        module.forward = make(module.forward)
        return
    stand_in = nn.Module()
    stand_in.forward = make(module.forward)
    above, _, name = path.rpartition(".")
    setattr(root.get_submodule(above), name, stand_in)


def _listening(forward: Callable[..., Any], found: list[Recorded]) -> Callable[..., Any]:
    def listening(*args: Any, **kwargs: Any) -> Any:
        try:
            takes, inputs = flatten((args, kwargs))
        except Declined as why:
            found.append(Recorded(declined=why.reason))
            return forward(*args, **kwargs)
        before = tuple(t.detach().clone() for t in inputs)
        returned = forward(*args, **kwargs)
        try:
            gives, outputs = flatten(returned)
        except Declined as why:
            found.append(Recorded(declined=why.reason))
            return returned
        after = tuple(t.detach().clone() for t in outputs)
        found.append(Recorded(takes, before, gives, after, not equal(before, inputs)))
        return returned

    return listening
