"""Whether a graph still gives the program's answers: compared with what the program gives in float64.

The float64 run is the nearest thing to the true answer. How far the program itself is from it is the reference's own
noise, and a pass may not move an output further than a bound that is no tighter than that noise. Both the absolute
and the relative error count: the one alone passes a fault in an output of tiny values, the other one near zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from edgeopt.program import ExportedGraph, graph
from edgeopt.runtime.compare import Error, broken, output_errors

MAX_ABS = 1e-4  # scaled by the largest value of the output; folding in float32 moves results by about 1e-6
MAX_REL = 1e-3  # of the largest value of the output, however small that is
_NOISY = 1e-2  # a program further than this from its float64 self rounds its way to another answer: see Check
_TIMES_NOISE = 4.0

Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """The largest errors over outputs and calls, and why they are too large, or None."""

    max_abs: float
    max_rel: float
    reason: str | None


class Check:
    """The calls that every pass of a run is judged by, with their true outputs and the program's own noise.

    The calls are the smallest reference call, and one of synthetic values at other sizes. Where the program in
    float64 gives another answer altogether (an argmax that flips, a cast that truncates) or cannot run, the program's
    own outputs are the truth; so they are for integer outputs always.
    """

    def __init__(self, program: ExportedGraph):
        self._signature = program.signature
        self._inputs = _calls(program)
        own = [graph.run(program, inputs) for inputs in self._inputs]
        self._truth, self.noise = self._study(program, own)

    def _study(self, program: ExportedGraph, own: list[Outputs]) -> tuple[list[Outputs], dict[str, Error]]:
        exact = {name: Error(math.inf, 0.0, 0.0) for name in program.signature.output_names}
        double = _in_float64(program, self._inputs)
        if double is None:
            return own, exact
        floats = {name for name, array in own[0].items() if array.dtype.kind == "f"}
        truth = [{n: d[n] if n in floats else o[n] for n in o} for d, o in zip(double, own, strict=True)]
        noise = output_errors(truth, own)
        lost = {name for name, error in noise.items() if error.max_abs > _NOISY}
        truth = [{n: o[n] if n in lost else t[n] for n in o} for t, o in zip(truth, own, strict=True)]
        return truth, {name: exact[name] if name in lost else error for name, error in noise.items()}

    def __call__(self, module: GraphModule) -> Verdict:
        """The verdict on a changed graph; whatever running it raises."""
        changed = ExportedGraph(signature=self._signature, reference=(), module=module)
        errors = output_errors(self._truth, [graph.run(changed, inputs) for inputs in self._inputs])
        reasons = [reason for name, error in errors.items() if (reason := self._reason(name, error))]
        return Verdict(
            max((e.max_abs for e in errors.values()), default=0.0),
            max((e.max_rel for e in errors.values()), default=0.0),
            "; ".join(reasons) or None,
        )

    def _reason(self, name: str, error: Error) -> str | None:
        if reason := broken(name, error):
            return reason
        noise = self.noise[name]
        most_abs = max(MAX_ABS, _TIMES_NOISE * noise.max_abs)
        most_rel = max(MAX_REL, _TIMES_NOISE * noise.max_rel)
        if error.max_abs > most_abs or error.max_rel > most_rel:
            return (
                f"output '{name}' is off by {error.max_abs:.3g} (at most {most_abs:.3g}), "
                f"{error.max_rel:.3g} of its largest value (at most {most_rel:.3g})"
            )
        return None


def _calls(program: ExportedGraph) -> list[dict[str, np.ndarray]]:
    """Inputs to judge by; one call where the model does not take synthetic values."""
    smallest = min(program.reference, key=lambda call: sum(array.size for array in call.inputs.values()))
    synthetic = graph.synthetic(program.signature, graph.sizes(program.signature, "example"), seed=17)
    with contextlib.suppress(Exception):  # an index out of a table's range, say: the range is not declared
        graph.run(program, synthetic)
        return [smallest.inputs, synthetic]
    return [smallest.inputs]


def _in_float64(program: ExportedGraph, calls: list[dict[str, np.ndarray]]) -> list[Outputs] | None:
    """The outputs of the program with every float as float64; None where it does not run so."""
    if program.integer:
        return None
    try:
        module = graph.copied(program.module).double()
        for node in module.graph.nodes:
            node.args, node.kwargs = _doubled(node.args), _doubled(node.kwargs)
        module.recompile()
        wide = [{k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in c.items()} for c in calls]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [graph.run(dataclasses.replace(program, module=module), inputs) for inputs in wide]
    except Exception:
        return None


def _doubled(value: Any) -> Any:
    """Arguments of a node with each float dtype replaced by float64."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_doubled(item) for item in value)
    return value
