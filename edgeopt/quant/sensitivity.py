"""Sensitivity: what each layer by itself costs the outputs when it alone is quantized.

Alone quantized, and not alone left float. An activation that quantizes badly is quantized between two layers: leaving
either of them float still quantizes it for the other, so that nothing seems to be won, while quantizing either shows
it. The noise of the layers nearly adds up at the outputs as well, so that what a set of layers costs can be told from
the single figures; behind one bad layer the gain of leaving another float cannot be seen.

One calibration serves all layers, and one float run: at each layer the graph is run on from there with the values that
the float run has up to it, which is half a run a layer on the mean. Two sets of live values are in memory at a time.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from edgeopt.program import ExportedGraph, data, graph, stored
from edgeopt.program.patterns import NODE
from edgeopt.progress import SILENT, Progress, log
from edgeopt.quant import convert, observers, rules
from edgeopt.quant import state as state_dict
from edgeopt.quant.prepare import Prepared, prepare
from edgeopt.quant.quantizer import Decision
from edgeopt.spec.profile import ResolvedQuantization
from edgeopt.spec.project import Project

MEASURED = (*sorted(rules.COUNTED), "add", "concat", "average pooling")  # what rounds something of its own
MOST_NOISE = 1e12  # in place of infinity and NaN
LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class Layer:
    """A quantized operator and what it costs when it alone is quantized.

    `noise`: power of the error over power of the output, of the output where that is largest; `sqnr_db` is the same
    as a ratio in dB, None where nothing changes. `metric_lost`: metric -> how far it falls; empty where not measured.
    """

    node: str
    path: str
    rule: str
    macs: int
    place: int  # among the program's convolutions, or its matrix products, in graph order; -1 for what is neither
    noise: float
    sqnr_db: float | None
    metric_lost: dict[str, float] = field(default_factory=dict)

    @property
    def pattern(self) -> str:
        """What `keep_float` takes to leave exactly this operator float."""
        return NODE + self.node

    @property
    def name(self) -> str:
        """The module as the user calls it; with the operator where the module is not its own."""
        if not self.path:
            return self.node
        return self.path if self.rule in rules.COUNTED else f"{self.path} ({self.rule})"


def calibrated(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    project: Project,
    *,
    keep_float: tuple[str, ...] = (),
    progress: Progress = SILENT,
) -> tuple[Prepared, list[list[torch.Tensor]]]:
    """The program with its ranges, and a few batches of positional inputs to measure with.

    It is what the build rounds: equalized, and without the layers that no range of eight bits serves. Ranges and
    weights are those of QAT where the program has a state of it, else ranges come from calibration.
    """
    trained = program.qat_state is not None
    if not trained:
        batches = data.calibration_batches(project, program.signature)
        how = {"limit": project.calibration_batches, "keep_float": keep_float, "progress": progress}
        found = convert.calibrated(program, quantization, batches, **how)
        return found.prepared, found.first
    prepared = prepare(program, quantization, qat=True, keep_float=keep_float)
    state_dict.load(prepared.module, program.qat_state)
    return prepared, [graph.to_tensors(program.signature, call.inputs) for call in program.reference]


def measure(
    prepared: Prepared, batches: Sequence[Sequence[torch.Tensor]], *, progress: Progress = SILENT
) -> tuple[Layer, ...]:
    """The layers of a calibrated or trained program by their noise, the one that costs most first."""
    alone = Alone(prepared)
    signal = torch.zeros(0)
    noise: dict[str, torch.Tensor] = {}
    ticker = _Ticker(len(batches) * len(alone.layers))
    with progress.bar("measuring layers", ticker.total) as advance:
        for batch in batches:
            exact = alone.exact(batch)
            powers = torch.stack([_power(value) for value in exact])
            signal = powers + (signal if len(signal) else 0)
            for decision, outputs in alone.quantized(batch):
                errors = [_power(o.double() - e.double()) for o, e in zip(outputs, exact, strict=True)]
                noise[decision.node] = noise.get(decision.node, 0) + torch.stack(errors)
                advance(1)
                ticker.tell()
    places = _places(prepared.report.layers)
    layers = [_layer(decision, places, noise.get(decision.node), signal) for decision in alone.layers]
    return tuple(sorted(layers, key=lambda layer: -layer.noise))


def with_metrics(layers: Sequence[Layer], lost: dict[str, dict[str, float]]) -> tuple[Layer, ...]:
    """The layers with what the metrics lose by each, node -> metric -> drop; the largest drop first, then by noise."""
    found = [dataclasses.replace(layer, metric_lost=lost.get(layer.node, {})) for layer in layers]
    return tuple(sorted(found, key=lambda layer: (-max(layer.metric_lost.values(), default=0.0), -layer.noise)))


class Alone:
    """A prepared program, run in float and with each of its layers alone quantized; its ranges stay as they are."""

    def __init__(self, prepared: Prepared):
        self._module = prepared.module
        self._corrects = not prepared.qat and bool({"biases", "rounding"} & set(prepared.quantization.improve))
        self._nodes = list(prepared.module.graph.nodes)
        self._last = graph.last_uses(self._nodes)
        self._writes = any(_writes(node) for node in self._nodes)
        self.layers = tuple(d for d in prepared.report.layers if d.quantized and d.rule in MEASURED)
        self._by_node = {decision.node: decision for decision in self.layers}

    def exact(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The float outputs."""
        with torch.no_grad():
            return self._on(0, {}, inputs, frozenset())

    def quantized(
        self, inputs: Sequence[torch.Tensor], *, only: frozenset[str] | None = None
    ) -> Iterator[tuple[Decision, list[torch.Tensor]]]:
        """Each layer in graph order with the outputs that the program gives when it alone is quantized.

        `only`: the nodes of the layers to run, else all.
        """
        values: dict[Node, Any] = {}
        given = iter(inputs)
        for at, node in enumerate(self._nodes):
            if node.op == "output":
                return
            with torch.no_grad():
                decision = self._by_node.get(node.name) if only is None or node.name in only else None
                copied = self._forked(values) if decision is not None else {}
                value = self._value(node, values, given, frozenset())
                if decision is not None:
                    copied[node] = self._rounded_layer(node, copied, value)
                    yield decision, self._on(at + 1, copied, (), _output_observers(node))
                values[node] = value
            self._forget(node, values)

    def _on(self, at: int, values: dict[Node, Any], inputs: Sequence[torch.Tensor], rounding: frozenset[Node]):
        """Run on from the node `at`; the observers in `rounding` round, the others pass their value on."""
        given = iter(inputs)
        for node in self._nodes[at:]:
            if node.op == "output":
                return list(torch.fx.node.map_arg(node.args[0], values.__getitem__))
            values[node] = self._value(node, values, given, rounding)
            self._forget(node, values)
        raise AssertionError("a graph without outputs")

    def _value(self, node: Node, values: dict[Node, Any], given: Iterator[torch.Tensor], rounding: frozenset[Node]):
        if node.op == "placeholder":
            return next(given)
        if node.op == "get_attr":
            return stored.tensor(self._module, node)
        if node.op == "call_module":
            value = values[node.args[0]]
            return observers.rounded(self._module.get_submodule(node.target), value) if node in rounding else value
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)

    def _rounded_layer(self, node: Node, values: dict[Node, Any], exact: Any) -> Any:
        """The layer's own value with the tensors that it reads rounded.

        What shifts a channel's mean is taken off where calibration will correct the bias by it.
        """

        def read(source: Node) -> Any:
            value = values[source]
            if source.op != "call_module":
                return value
            return observers.rounded(self._module.get_submodule(source.target), value)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), read)
        value = node.target(*args, **kwargs)
        if not self._corrects or not _has_bias(node):
            return value
        channel = value.ndim - 1 if rules.operator(node) == "linear" else 1
        others = [axis for axis in range(value.ndim) if axis != channel]
        return value - (value - exact).mean(others, keepdim=True)

    def _forked(self, values: dict[Node, Any]) -> dict[Node, Any]:
        """The live values; copied where the graph writes to some."""
        if not self._writes:
            return dict(values)
        return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}

    def _forget(self, node: Node, values: dict[Node, Any]) -> None:
        for used in self._last.get(node, ()):
            values.pop(used, None)


def _has_bias(node: Node) -> bool:
    weighted = (*rules.CONVOLUTIONS, *rules.TRANSPOSED, "linear")
    return rules.operator(node) in weighted and len(node.args) > 2 and isinstance(node.args[2], Node)


def _output_observers(node: Node) -> frozenset[Node]:
    """The observers of the layer's own result: behind it, or behind the activation that it takes along."""
    end, users = node, list(node.users)
    if len(users) == 1 and rules.operator(users[0]) in rules.ACTIVATIONS:
        end = users[0]
    if not rules.is_quantized(end):
        return frozenset()
    return frozenset(user for user in end.users if user.op == "call_module")


def _places(decisions: Sequence[Decision]) -> dict[str, int]:
    """Node -> its position among the nodes of its kind, quantized or not."""
    places: dict[str, int] = {}
    for kind in (("convolution", "transposed convolution"), ("linear", "matmul")):
        for place, decision in enumerate(d for d in decisions if d.rule in kind):
            places[decision.node] = place
    return places


def _layer(decision: Decision, places: dict[str, int], noise: torch.Tensor | None, signal: torch.Tensor) -> Layer:
    share = 0.0
    if noise is not None:
        ratio = torch.where(noise > 0, noise / signal, torch.zeros_like(noise))
        share = min(float(ratio.max()), MOST_NOISE) if not bool(torch.isnan(ratio).any()) else MOST_NOISE
    sqnr = -10 * math.log10(share) if share > 0 else None
    return Layer(decision.node, decision.path, decision.rule, decision.macs, places.get(decision.node, -1), share, sqnr)


def _power(value: torch.Tensor) -> torch.Tensor:
    return value.double().square().sum()


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and bool(getattr(schema, "is_mutable", False))


class _Ticker:
    """A line with the time left now and then, for logs and for those without a terminal."""

    def __init__(self, total: int):
        self.total, self._done, self._started = total, 0, time.perf_counter()
        self._last = self._started

    def tell(self) -> None:
        self._done += 1
        now = time.perf_counter()
        if now - self._last >= LOG_EVERY_S and self._done < self.total:
            self._last = now
            left_s = (now - self._started) / self._done * (self.total - self._done)
            log.info("sensitivity: %d of %d runs, about %.0f s left", self._done, self.total, left_s)
