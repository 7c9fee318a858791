"""Capture by `torch.export`: an ExportedGraph that keeps its dynamic axes."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import Mod

from edgeopt.capture.declined import Declined, first_line
from edgeopt.capture.eager import Eager
from edgeopt.capture.flat import flat
from edgeopt.ports.user_code import user_line
from edgeopt.program import ExportedGraph, Signature, graph
from edgeopt.program.tracing import plain_attention, quiet

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def export(model: Eager, signature: Signature, *, copy_inputs: bool, seed: int) -> ExportedGraph:
    """The model as an ExportedGraph; Declined where export fails or an axis does not stay dynamic."""
    module = flat(model, copy_inputs=copy_inputs)
    for path, layer in module.named_modules():
        if path and isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(partial(_require_fixed_time, path), with_kwargs=True)
    return of_module(module, model, signature, seed)


def _require_fixed_time(path: str, layer: nn.RNNBase, args: tuple, kwargs: dict[str, Any]) -> None:
    """Stop where export would unroll a recurrent layer for minutes, only to freeze the axis that it steps along."""
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, torch.Tensor) and isinstance(x.shape[time_axis(layer, x)], torch.SymInt):
        raise Declined(f"the time axis of '{path}' ({type(layer).__name__}) varies, and export would freeze it")


def time_axis(layer: nn.RNNBase, x: torch.Tensor) -> int:
    """The axis of its input along which a recurrent layer steps; it takes inputs without a batch too."""
    return 1 if layer.batch_first and x.ndim == 3 else 0


def of_module(module: nn.Module, model: Eager, signature: Signature, seed: int) -> ExportedGraph:
    """`module`, the model flattened and perhaps changed inside, as an ExportedGraph; Declined."""
    example = graph.synthetic(signature, graph.sizes(signature, "example"), seed)
    try:
        with torch.no_grad(), plain_attention(), _quiet():
            exported = torch.export.export(
                module,
                tuple(graph.to_tensors(signature, example)),
                dynamic_shapes=(graph.dynamic_shapes(signature),),  # one entry: forward takes *tensors
                strict=False,
            )
            captured = exported.module(check_guards=False)  # the guard of capture checks more than they do
    except Exception as why:
        raise Declined(_reason(why), user_line(why, model.folder)) from why
    _check_axes(captured, signature)
    return ExportedGraph(signature=signature, reference=(), module=captured)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what export prints and logs of a failure: the exception says it, and we pass that on."""
    with quiet(*_LOGGERS), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _reason(why: BaseException) -> str:
    """Export's message in one line: for a violated constraint, the constraint itself."""
    lines = [line.strip(" -") for line in str(why).splitlines()]
    constraints = [line for line in lines if re.match(r"(You marked|Not all values of)", line)]
    return re.split(r"\. If you're using mark_dynamic", constraints[0])[0] if constraints else first_line(why)


def _check_axes(captured: torch.fx.GraphModule, signature: Signature) -> None:
    placeholders = [n.meta["val"] for n in captured.graph.nodes if n.op == "placeholder"]
    if reason := _merged(placeholders, signature):
        raise Declined(reason)


def lost_axis(inputs: Sequence[torch.Tensor], signature: Signature) -> str | None:
    """Which axis of the symbolic inputs, or size computed of one, is a number or another axis by now, or None."""
    return _merged(inputs, signature) or _pinned(inputs)


def _merged(inputs: Sequence[torch.Tensor], signature: Signature) -> str | None:
    symbols: dict[str, str] = {}
    for tensor, spec in zip(inputs, signature.inputs, strict=True):
        for size, name in zip(tensor.shape, spec.shape, strict=True):
            if isinstance(name, int) or signature.axes[name].min == signature.axes[name].max:
                continue
            if isinstance(size, int) or not size.node.expr.free_symbols:
                return f"the axis {name} of '{spec.name}' was frozen at {size}"
            symbols[name] = str(size)
    for name, symbol in symbols.items():
        same = [other for other, s in symbols.items() if s == symbol and other != name]
        if same:
            return f"the axes {name} and {same[0]} were taken for one"
    return None


def _pinned(inputs: Sequence[torch.Tensor]) -> str | None:
    """The first condition on the inputs' sizes that fixes what is computed of one, as in W // 2 == 8, or None."""
    sizes = [size for tensor in inputs for size in tensor.shape if isinstance(size, torch.SymInt)]
    for guard in sizes[0].node.shape_env.guards if sizes else ():
        left, right = guard.expr.args if len(guard.expr.args) == 2 else (guard.expr, guard.expr)
        if isinstance(guard.expr, sympy.Eq) and right.is_number and left.free_symbols and not left.has(Mod):
            return f"a size that is computed of an axis was frozen at {right}"
    return None
