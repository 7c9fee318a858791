"""Cross-layer equalization: channels of very different range are scaled alike, and the next layer scales them back.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.1: a
positive scale of a channel passes through ReLU. Theirs takes the ranges of weights, since their weights have one scale
a tensor; here weights have one scale a channel, so that a writer's rows are scaled without any loss, and the ranges
that count are those of the activations, from calibration data. A clamp at 6 lets a scale pass as long as nothing that
calibration saw reaches the clamp: such a channel is scaled up until its largest value is at the clamp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import ExportedGraph, graph
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import channels
from edgeopt.quant.channels import Group
from edgeopt.quant.prepare import complete_metadata

SHARE = 0.5  # exponent where readers pay for it: their weights of the channels get smaller as the channels get larger
MOST = 64.0  # largest scale: a channel that is this small beside the others hardly counts
# Of a clamp above the largest value that calibration saw. Measured on pictures that it did not see, activations alone
# as integers: EfficientNet-Lite0 21.4 dB at 1.5, 23.5 at 3, 27 at 6; MobileNetV2 18.4 at 1.5, 16.9 at 3, 15.5 at 6.
MARGIN = 2.0


def equalize(
    program: ExportedGraph,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    margin: float = MARGIN,
    progress: Progress = SILENT,
) -> tuple[ExportedGraph, str]:
    """The program with equal channel ranges, and what was done in words. Weights change, the function does not.

    `batches`: positional tensors; the ranges of the channels are those seen in them. Beyond them a channel that a
    clamp follows is cut at no less than `margin` times what they showed.
    """
    module = graph.copied(program.module)
    complete_metadata(module, program)
    found = channels.groups(module)
    if not found:
        return program, "no layers whose channels can be scaled together"
    ranges = _ranges(module, found, batches, progress)
    scaled = sum(channels.scale(module, group, _scales(group, ranges, margin)) for group in found)
    left = "" if len(found) == scaled else f"; {len(found) - scaled} are even already"
    return dataclasses.replace(program, module=module), f"{scaled} groups of channels{left}"


def _scales(group: Group, ranges: dict[Node, tuple[torch.Tensor, torch.Tensor]], margin: float) -> torch.Tensor:
    """[channels]: what each is multiplied by."""
    largest = torch.stack([torch.maximum(ranges[n][1], -ranges[n][0]) for n in group.quantized]).amax(0)
    share = 1.0 if group.free else SHARE
    scales = (largest.max() / largest.clamp_min(1e-12)).clamp(1.0, MOST) ** share
    for node, low, high in group.clamps:
        least, most = ranges[node]
        room = high / (margin * most.clamp_min(1e-12))
        if low < 0.0:
            room = torch.minimum(room, low / (margin * least.clamp_max(-1e-12)))
        scales = torch.minimum(scales, room.clamp_min(1.0))
    return torch.where(largest > 0, scales, torch.ones_like(scales))


def _ranges(
    module: GraphModule, found: tuple[Group, ...], batches: Sequence[Sequence[torch.Tensor]], progress: Progress
) -> dict[Node, tuple[torch.Tensor, torch.Tensor]]:
    """Node -> lowest and highest value of each channel, [channels] both."""
    wanted = {}
    for group in found:
        axis = channels.axis_of(group.writers[0])
        wanted |= dict.fromkeys([*group.quantized, *(node for node, _, _ in group.clamps)], axis)
    watcher = _Watcher(module, wanted)
    with torch.no_grad(), progress.bar("ranges of channels", len(batches)) as advance:
        for batch in batches:
            watcher.run(*batch)
            advance(1)
    return watcher.seen


class _Watcher(torch.fx.Interpreter):
    """Runs the graph and keeps the ranges of the channels of the wanted nodes."""

    def __init__(self, module: GraphModule, wanted: dict[Node, int]):
        super().__init__(module)
        self._wanted = wanted
        self.seen: dict[Node, tuple[torch.Tensor, torch.Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self._wanted:
            flat = value.movedim(self._wanted[n], 0).flatten(1)
            low, high = flat.amin(1), flat.amax(1)
            if n in self.seen:
                low, high = torch.minimum(low, self.seen[n][0]), torch.maximum(high, self.seen[n][1])
            self.seen[n] = (low, high)
        return value
