"""How far above the values that calibration saw equalization leaves a clamp: chosen by data that it did not see.

A wide margin cuts less of what other data have more of, a narrow one gives small channels more steps; networks differ
in which of them costs more. So each margin is tried: channels and ranges are found on one half of the samples, and the
outputs on the other half, with activations as integers and weights as floats, are compared with the float model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from edgeopt.program import ExportedGraph, graph
from edgeopt.progress import SILENT, Progress
from edgeopt.quant import channels, equalize, observers, samples
from edgeopt.quant.prepare import complete_metadata, prepare
from edgeopt.quant.samples import Batch
from edgeopt.spec.profile import ResolvedQuantization

MARGINS = (1.2, equalize.MARGIN, 6.0)
LEAST_SAMPLES = 16
MOST_SAMPLES = 100  # of all, in both halves


def chosen(
    program: ExportedGraph,
    quantization: ResolvedQuantization,
    kept: Sequence[Batch],
    *,
    keep_float: tuple[str, ...] = (),
    progress: Progress = SILENT,
) -> float:
    """The margin of MARGINS with the least error on the half that was not looked at.

    `equalize.MARGIN` where no clamp follows channels that are scaled, or fewer than LEAST_SAMPLES samples are there.
    """
    if not _clamped(program) or sum(map(samples.count, kept)) < LEAST_SAMPLES:
        return equalize.MARGIN
    fitted, judges = _halves(program, kept)
    if not fitted or not judges:
        return equalize.MARGIN
    errors = {}
    with torch.no_grad(), progress.bar("margins of clamps", len(MARGINS)) as advance:
        wanted = [_outputs(program.module, batch) for batch in judges]
        for margin in MARGINS:
            even, _ = equalize.equalize(program, fitted, margin=margin)
            found = _rounded(even, quantization, keep_float, fitted, judges)
            errors[margin] = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
            advance(1)
    return min(errors, key=lambda margin: (errors[margin], margin))


def _clamped(program: ExportedGraph) -> bool:
    module = graph.copied(program.module)
    complete_metadata(module, program)
    return any(group.clamps for group in channels.groups(module))


def _halves(program: ExportedGraph, kept: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Every other sample, or batch where samples are not told apart, to fit by, and the others to judge."""
    if not samples.by_rows(program.signature):
        return list(kept[::2]), list(kept[1::2])
    step = max(1, sum(map(samples.count, kept)) // MOST_SAMPLES)
    thin = [[tensor[::step] for tensor in batch] for batch in kept]
    halves = [[[tensor[i::2] for tensor in batch] for batch in thin] for i in (0, 1)]
    return tuple([batch for batch in half if samples.count(batch)] for half in halves)


def _rounded(
    even: ExportedGraph, quantization: ResolvedQuantization, keep_float: tuple[str, ...], fitted: list[Batch],
    judges: list[Batch],
) -> list[torch.Tensor]:  # fmt: skip
    """Outputs for the judges with integer activations, whose ranges are of the fitted half."""
    module = prepare(even, quantization, keep_float=keep_float).module
    for batch in fitted:
        module(*batch)
    for target in {node.target for node in module.graph.nodes if node.op == "call_module"}:
        owner, _, leaf = target.rpartition(".")
        observer = module.get_submodule(target)
        setattr(module.get_submodule(owner), leaf, _Rounds(observer) if _sees_values(observer) else torch.nn.Identity())
    module.recompile()
    return [_outputs(module, batch) for batch in judges]


def _sees_values(observer: torch.nn.Module) -> bool:
    """Whether it is an activation's, and values went through it."""
    return isinstance(observer, observers.Watched) and bool(observer.min_val <= observer.max_val)


class _Rounds(torch.nn.Module):
    """In an observer's place: rounds what it observed."""

    def __init__(self, observer: torch.nn.Module):
        super().__init__()
        self.observer = observer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return observers.rounded(self.observer, x)


def _outputs(module: GraphModule, batch: Batch) -> torch.Tensor:
    """All that is floating point, in one row."""
    leaves = torch.utils._pytree.tree_leaves(module(*batch))
    return torch.cat([y.flatten() for y in leaves if isinstance(y, torch.Tensor) and y.is_floating_point()])
