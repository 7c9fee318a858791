"""The user's own operators as a model calls them: each must say what it gives without running, and say it right.

torch.export asks an operator's fake implementation for shapes and dtypes, and believes it and the operator's schema:
a wrong one is a wrong program on the device. Each operator that the model calls is tried here with its real arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from edgeopt.capture import eager
from edgeopt.capture.declined import first_line
from edgeopt.capture.eager import Eager
from edgeopt.errors import CaptureError
from edgeopt.ports import user_code
from edgeopt.program.own_operators import is_own

_SHOWN = 300


@dataclass(frozen=True)
class _Call:
    """The first call of an operator: its arguments, copied before the call, its results, and the user's line."""

    op: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    results: tuple
    where: str


def check(model: Eager, inputs: dict[str, np.ndarray]) -> None:
    """Try each operator of the user's that the model calls for named inputs.

    CaptureError, with the line of the call and what to write, for an operator without a fake implementation, for one
    whose fake gives other shapes or dtypes than the operator, and for one that does what its schema does not say.
    """
    for call in _calls(model, inputs):
        _check_fake(call)
        _check_schema(call)


def _calls(model: Eager, inputs: dict[str, np.ndarray]) -> list[_Call]:
    with _Recorder(model.folder) as recorder:
        eager.call(model, inputs)
    return list(recorder.calls.values())


class _Recorder(TorchDispatchMode):
    """Keeps the first call of each operator that is not torch's own."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder.resolve()
        self.calls: dict[torch._ops.OpOverload, _Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not is_own(func) or func in self.calls:
            return func(*args, **kwargs)
        given = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
        returned = func(*args, **kwargs)
        results = returned if isinstance(returned, tuple | list) else (returned,)
        self.calls[func] = _Call(func, *given, tuple(results), self._line())
        return returned

    def _line(self) -> str:
        return user_code.calling_line(self.folder) or "the model's forward"


def _check_fake(call: _Call) -> None:
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode, torch.no_grad():
            args, kwargs = torch.utils._pytree.tree_map_only(
                torch.Tensor, mode.from_tensor, (call.args, call.kwargs)
            )  # fmt: skip
            call.op(*args, **kwargs)
    except Exception as why:  # a fake implementation is the user's code
        name = _name(call.op)
        if _is_missing(why):
            raise CaptureError(
                f"the operator {name} has no fake implementation, which says its results' shapes and dtypes without "
                "running it", where=call.where, todo=f"add it to your operator library:\n{snippet(call.op, call)}",
            ) from why  # fmt: skip
        raise CaptureError(
            f"the fake implementation of {name} fails: {type(why).__name__}: {first_line(why)}", where=call.where,
            todo="compute shapes and dtypes there from those of the arguments alone; their values are not known",
        ) from why  # fmt: skip


def _is_missing(why: BaseException) -> bool:
    return isinstance(why, UnsupportedOperatorException) or "no fake impl" in str(why)


def _check_schema(call: _Call) -> None:
    """torch's own checks of an operator against its schema and its fake, with the arguments of the call."""
    found = torch.library.opcheck(
        call.op, call.args, call.kwargs, test_utils=("test_schema", "test_faketensor"), raise_exception=False
    )
    name = _name(call.op)
    fake, schema = found["test_faketensor"], found["test_schema"]
    if isinstance(schema, BaseException):
        raise CaptureError(
            f"the operator {name} does not keep to its schema {call.op._schema}: {first_line(schema)}",
            where=call.where, todo="say in mutates_args (or as Tensor(a!) in the schema) what it writes to, and return "
            "new tensors rather than its arguments",
        ) from schema  # fmt: skip
    if isinstance(fake, BaseException):
        raise CaptureError(
            f"the fake implementation of {name} does not give what the operator gives: {_mismatch(fake)}",
            where=call.where, todo=f"let it return the same shapes and dtypes, as in:\n{snippet(call.op, call)}",
        ) from fake  # fmt: skip


def _mismatch(why: BaseException) -> str:
    return first_line(why).rpartition("mismatched tensor metadata: ")[2][:_SHOWN]


def _name(op: torch._ops.OpOverload) -> str:
    return op._schema.name


def snippet(op: torch._ops.OpOverload, call: _Call) -> str:
    """A fake implementation of the operator that is right for the call, as Python source."""
    arguments = ", ".join(_parameter(a) for a in op._schema.arguments)
    named = {a.name: v for a, v in zip(op._schema.arguments, call.args, strict=False)} | call.kwargs
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    results = [_result(value, tensors) for value in call.results]
    returned = ", ".join(results) if len(op._schema.returns) != 1 or len(results) == 1 else f"[{', '.join(results)}]"
    return (
        f'@torch.library.register_fake("{_name(op)}")\ndef _({arguments}):\n    return {returned or None}'  # fmt: skip
    )


def _parameter(argument: torch.Argument) -> str:
    text = re.sub(r"\W", "_", argument.name)
    return f"{text}={argument.default_value!r}" if argument.has_default_value() else text


def _result(value: Any, tensors: dict[str, torch.Tensor]) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    alike = [name for name, tensor in tensors.items() if tensor.shape == value.shape]
    same = [name for name in alike if tensors[name].dtype == value.dtype]
    if same:
        return f"torch.empty_like({same[0]})"
    if alike:
        return f"torch.empty_like({alike[0]}, dtype={value.dtype})"
    sizes = ", ".join(_size(i, size, tensors) for i, size in enumerate(value.shape))
    shape = f"({sizes}{',' if value.dim() == 1 else ''})"
    typed = next((name for name, tensor in tensors.items() if tensor.dtype == value.dtype), None)
    if typed is not None:
        return f"{typed}.new_empty({shape})"
    first = next(iter(tensors), None)
    return f"{first}.new_empty({shape}, dtype={value.dtype})" if first else f"torch.empty({shape}, dtype={value.dtype})"


def _size(position: int, size: int, tensors: dict[str, torch.Tensor]) -> str:
    """The size as that of an argument's axis where one has it, the same axis first: fixed sizes freeze axes."""
    if size == 1:
        return "1"
    axes = [(i != position, name, i) for name, t in tensors.items() for i, s in enumerate(t.shape) if s == size]
    if not axes:
        return str(size)
    _, name, axis = min(axes, key=lambda found: found[0])
    return f"{name}.shape[{axis}]"
