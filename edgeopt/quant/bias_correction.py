"""Bias correction: what rounding the weights and inputs shifts the mean of a layer's outputs by goes into its bias.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2, here
with means from calibration data. Layers are corrected in graph order, each with its inputs as the corrected integer
layers before it give them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import rules
from edgeopt.quant.pairs import Walk, own_bias
from edgeopt.quant.samples import count

LEAST_SAMPLES = 8  # of fewer, a mean says more about the samples than about the layer
SURE = 2.0  # standard errors that a channel's shift must exceed to be corrected
_LAYERS = (*rules.CONVOLUTIONS, *rules.TRANSPOSED, "linear")


def correct_biases(
    module: GraphModule, batches: Sequence[Sequence[torch.Tensor]], *, progress: Progress = SILENT
) -> int:
    """Change the biases of a calibrated `module` (observers, not fake-quantizers) in place; returns how many layers.

    `batches`: positional input tensors, first axis the samples; all are in memory at once, as are the values of
    both programs that are still needed.
    """
    if sum(count(list(batch)) for batch in batches) < LEAST_SAMPLES:
        return 0
    corrected: list[Node] = []
    Walk(module, batches).run(
        "correcting biases", after=lambda walk, node: _correct(walk, node, corrected), progress=progress
    )
    return len(corrected)


def _correct(walk: Walk, node: Node, corrected: list[Node]) -> None:
    if rules.operator(node) not in _LAYERS:
        return
    bias = own_bias(node)
    if bias is None or not isinstance(node.args[1], Node) or node.args[1].op != "call_module":
        return  # no bias of its own, or a weight that stays float
    values = walk.values[node]
    channel = -1 if rules.operator(node) == "linear" else 1
    shifts = torch.cat([_sample_means(exact - rounded, channel) for exact, rounded in values])
    mean, error = shifts.mean(0), shifts.std(0) / len(shifts) ** 0.5
    mean = torch.where(mean.abs() > SURE * error, mean, torch.zeros_like(mean))
    stored.tensor(walk.module, bias).add_(mean)
    shape = [1] * values[0][1].ndim
    shape[channel] = -1
    walk.values[node] = [(exact, rounded + mean.reshape(shape)) for exact, rounded in values]
    corrected.append(node)


def _sample_means(shift: torch.Tensor, channel: int) -> torch.Tensor:
    """[samples, channels]: the mean over everything else, for each sample."""
    moved = shift.movedim(channel, 1)
    return moved.flatten(2).mean(2) if moved.ndim > 2 else moved
