"""Bias correction: what rounding the weights and inputs shifts the mean of a layer's outputs by goes into its bias.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2, here
with means from calibration data. Layers are corrected in graph order, each with its inputs as the corrected integer
layers before it give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.progress import SILENT, Progress
from edgeopt.quant import findings, pt2e, rules

LEAST_SAMPLES = 8  # of fewer, a mean says more about the samples than about the layer
SURE = 2.0  # standard errors that a channel's shift must exceed to be corrected


def correct_biases(
    module: GraphModule, batches: Sequence[Sequence[torch.Tensor]], *, progress: Progress = SILENT
) -> int:
    """Change the biases of a calibrated `module` (observers, not fake-quantizers) in place; returns how many layers.

    `batches`: positional input tensors, first axis the samples; all are in memory at once, as are the values of
    both programs that are still needed, so a few dozen samples are the right number.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    samples = sum(batch[0].shape[0] if batch[0].ndim else 1 for batch in batches)
    if samples < LEAST_SAMPLES:
        return 0
    values: dict[Node, list[_Pair]] = {
        node: [(batch[i], batch[i]) for batch in batches] for i, node in enumerate(inputs)
    }
    last_use = _last_uses(module)
    corrected = 0
    with torch.no_grad(), progress.bar("correcting biases", len(module.graph.nodes)) as advance:
        for node in module.graph.nodes:
            advance(1)
            if node.op not in ("placeholder", "output"):
                values[node] = [_run(module, node, values, k) for k in range(len(batches))]
                corrected += _correct(module, node, values)
            for used in last_use.get(node, ()):
                values.pop(used, None)
    return corrected


_Pair = tuple[Any, Any]  # a node's value in the float program, and in the integer one as simulated


def _run(module: GraphModule, node: Node, values: dict[Node, list[_Pair]], k: int) -> _Pair:
    if node.op == "get_attr":
        stored = findings.stored(module, node)
        return stored.clone(), stored  # the float program keeps the bias that the other one gets corrected
    if node.op == "call_module":
        exact, rounded = values[node.args[0]][k]
        return exact, _rounded(module.get_submodule(node.target), rounded)
    results = []
    for side in (0, 1):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n, s=side: values[n][k][s])
        results.append(node.target(*args, **kwargs))
    return results[0], results[1]


def _rounded(observer: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    if isinstance(observer, pt2e.DerivedObserverOrFakeQuantize):  # an int32 bias: its rounding does not show
        return value
    scale, zero_point = observer.calculate_qparams()
    low, high = observer.quant_min, observer.quant_max
    if scale.numel() > 1:
        zero_point = zero_point.to(torch.int32)
        return torch.fake_quantize_per_channel_affine(value, scale, zero_point, observer.ch_axis, low, high)
    return torch.fake_quantize_per_tensor_affine(value, float(scale), int(zero_point), low, high)


def _correct(module: GraphModule, node: Node, values: dict[Node, list[_Pair]]) -> bool:
    bias = _own_bias(module, node)
    if bias is None:
        return False
    channel = -1 if rules.operator(node) == "linear" else 1
    shifts = torch.cat([_sample_means(exact - rounded, channel) for exact, rounded in values[node]])
    mean, error = shifts.mean(0), shifts.std(0) / len(shifts) ** 0.5
    mean = torch.where(mean.abs() > SURE * error, mean, torch.zeros_like(mean))
    findings.stored(module, bias).add_(mean)
    shape = [1] * values[node][0][1].ndim
    shape[channel] = -1
    values[node] = [(exact, rounded + mean.reshape(shape)) for exact, rounded in values[node]]
    return True


def _own_bias(module: GraphModule, node: Node) -> Node | None:
    """The stored bias that only `node`, an integer layer, uses; None where there is none."""
    if rules.operator(node) not in (*rules.CONVOLUTIONS, *rules.TRANSPOSED, "linear") or len(node.args) < 3:
        return None
    if not isinstance(node.args[1], Node) or node.args[1].op != "call_module":
        return None  # its weight stays float
    bias = node.args[2]
    while isinstance(bias, Node) and bias.op == "call_module" and len(bias.users) == 1:
        bias = bias.args[0]
    alone = isinstance(bias, Node) and bias.op == "get_attr" and len(bias.users) == 1
    return bias if alone else None


def _sample_means(shift: torch.Tensor, channel: int) -> torch.Tensor:
    """[samples, channels]: the mean over everything else, for each sample."""
    moved = shift.movedim(channel, 1)
    return moved.flatten(2).mean(2) if moved.ndim > 2 else moved


def _last_uses(module: GraphModule) -> dict[Node, list[Node]]:
    seen: set[Node] = set()
    out: dict[Node, list[Node]] = {}
    for node in reversed(module.graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                out.setdefault(node, []).append(used)
    return out
