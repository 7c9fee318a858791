"""Capture by `torch.export`: an ExportedGraph that keeps its dynamic axes."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

import torch

from edgeopt.capture.declined import Declined, first_line
from edgeopt.capture.eager import Eager, plain_attention
from edgeopt.capture.flat import flat
from edgeopt.ports.user_code import user_line
from edgeopt.program import ExportedGraph, Signature, graph


def export(model: Eager, signature: Signature, *, copy_inputs: bool, seed: int) -> ExportedGraph:
    """The model as an ExportedGraph; Declined where export fails or an axis does not stay dynamic."""
    module = flat(model.fresh(), signature.input_names, copy_inputs=copy_inputs)
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
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was, logger.disabled = logger.disabled, True
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was


def _reason(why: BaseException) -> str:
    """Export's message in one line: for a violated constraint, the constraint itself."""
    lines = [line.strip(" -") for line in str(why).splitlines()]
    constraints = [line for line in lines if re.match(r"(You marked|Not all values of)", line)]
    return re.split(r"\. If you're using mark_dynamic", constraints[0])[0] if constraints else first_line(why)


def _check_axes(captured: torch.fx.GraphModule, signature: Signature) -> None:
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    symbols: dict[str, str] = {}
    for node, spec in zip(placeholders, signature.inputs, strict=True):
        for size, name in zip(node.meta["val"].shape, spec.shape, strict=True):
            if isinstance(name, int) or signature.axes[name].min == signature.axes[name].max:
                continue
            if isinstance(size, int) or not size.node.expr.free_symbols:
                raise Declined(f"the axis {name} of '{spec.name}' was frozen at {size}")
            symbols[name] = str(size)
    for name, symbol in symbols.items():
        same = [other for other, s in symbols.items() if s == symbol and other != name]
        if same:
            raise Declined(f"the axes {name} and {same[0]} were taken for one")
