"""Where a trace freezes values: Python reads a tensor that comes from the inputs, and no probe may meet the other way.

A branch on `x.max() > 100` is taken once in a trace, and inputs of the usual range never show that its other way is
lost. So tensors are followed through the trace from the inputs on to where Python reads them.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from edgeopt.capture.arguments import Arguments

_READS = {
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "__contains__", "item", "tolist",
    "numpy", "is_nonzero", "equal", "allclose",
}  # fmt: skip
_SIZED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
_SIZES = {"size", "numel", "nelement", "__len__", "__iter__", "unbind"}
_SHAPE = torch.Tensor.shape.__get__
_TORCH = Path(torch.__file__).parent


class Followed(TorchFunctionMode):
    """Follows what is computed from the inputs while a trace runs, and notes where Python reads it.

    `values` and `sizes` are the places, 'model.py, line 8', at which a value or a size of the inputs is read. Left out
    are mere checks, whose loss changes no answer: an `assert`, and an `if` that only raises.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self.values: dict[str, None] = {}
        self.sizes: dict[str, None] = {}
        self._folder = folder.resolve()
        self._checks: dict[tuple[Path, int], bool] = {}  # a loop reads at one place many times
        self._from_values = WeakIdKeyDictionary()  # tensor -> True where its values come from those of the inputs
        self._from_sizes = WeakIdKeyDictionary()  # where they come from sizes; in a trace a size is a tensor
        self._sized_by_values = WeakIdKeyDictionary()  # where its own size comes from values

    def marking(self, given: Arguments) -> Arguments:
        """`given`, which marks the tensors that it makes arguments of as inputs."""
        return _Marking(given.names, given.structure, given.makers, self._from_values)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = list(_tensors((args, kwargs)))
        values, sizes = (any(t in marked for t in given) for marked in (self._from_values, self._from_sizes))
        asks_size = name in _SIZES or func == _SHAPE
        if asks_size:
            values, sizes = any(t in self._sized_by_values for t in given), True
        if name in _READS or asks_size and values:
            self._note(name, values, sizes)
        returned = func(*args, **kwargs)
        if name not in ("__iter__", "unbind"):
            self._mark(name, args, returned, values, sizes)
        elif any(t in self._from_values for t in given):
            self._mark(name, args, returned, True, False)
        return returned

    def _mark(self, name: str, args: tuple, returned: Any, values: bool, sizes: bool) -> None:
        made = list(_tensors(returned)) + ([args[0]] if name == "__setitem__" else [])
        made += [t._base for t in made if t._base is not None]
        for tensor in made:
            if values:
                self._from_values[tensor] = True
            elif sizes:
                self._from_sizes[tensor] = True
        masked = name == "__getitem__" and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:]))
        if values and (masked or name in _SIZED_BY_VALUES or name == "where" and len(args) == 1):
            for tensor in made:
                self._sized_by_values[tensor] = True

    def _note(self, name: str, values: bool, sizes: bool) -> None:
        if not values and not sizes:
            return
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if path.is_absolute() and _TORCH not in path.parents and path != Path(__file__):
                place = (path, frame.lineno or 0)
                if place not in self._checks:
                    self._checks[place] = _is_check(*place)
                if not self._checks[place]:
                    (self.values if values else self.sizes)[self._words(path, frame.lineno)] = None
                return

    def _words(self, path: Path, line: int | None) -> str:
        inside = self._folder in path.parents
        return f"{path.relative_to(self._folder) if inside else path.name}, line {line}"


class _Marking(Arguments):
    def __init__(self, names: tuple[str, ...], structure: Any, makers: dict, marked: WeakIdKeyDictionary):
        super().__init__(names, structure, makers)
        object.__setattr__(self, "_marked", marked)

    def of(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        for tensor in tensors:
            self._marked[tensor] = True
        return super().of(tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _is_check(path: Path, line: int) -> bool:
    """Whether the line stands in an assert, or in the condition of an if that only raises."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return True
        if isinstance(node, ast.If) and node.lineno <= line <= (node.test.end_lineno or node.lineno):
            return not node.orelse and all(isinstance(statement, ast.Raise) for statement in node.body)
    return False
