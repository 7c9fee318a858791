"""Quantization-aware training: the user's batches and loss on the fake-quantized program, and the float control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edgeopt.errors import StageError
from edgeopt.program import graph
from edgeopt.progress import SILENT, Progress
from edgeopt.quant.prepare import Prepared
from edgeopt.quant.training import loop, ranges
from edgeopt.quant.training.batches import Loader
from edgeopt.quant.training.checkpoints import Checkpoints
from edgeopt.quant.training.loop import Score
from edgeopt.quant.training.optimizers import MakeOptimizer
from edgeopt.quant.training.ranks import ALONE, Ranks
from edgeopt.quant.training.step import Loss
from edgeopt.spec.project import Qat


@dataclass(frozen=True)
class Training:
    """`state`: the fake-quantized program's state_dict, on the CPU; `details`: steps, seconds, losses, metrics."""

    state: dict[str, torch.Tensor]
    details: dict[str, Any]


def train(
    prepared: Prepared,
    loader: Loader,
    loss: Loss,
    settings: Qat,
    *,
    seed: int,
    score: Score | None = None,
    make_optimizer: MakeOptimizer | None = None,
    kept: Checkpoints | None = None,
    ranks: Ranks = ALONE,
    progress: Progress = SILENT,
) -> Training:
    """Train the weights of `prepared` (made with qat=True) and let the activations' ranges follow.

    `loader()` is called once an epoch and yields ({input name: array}, target); `loss(outputs, target)` gets the
    outputs in the user's own structure and gives a scalar. Ranges stay after `freeze_observers_at` of the steps.
    With `kept` a killed training goes on from the last checkpoint, bit for bit. `score(module)` gives the metrics
    that choose the best epoch. Errors are those of `loop.run`.
    """
    task = loop.Task(
        prepared.module, prepared.program.signature, loader, loss, settings, seed,
        score=score, make_optimizer=make_optimizer, kept=kept, ranks=ranks, progress=progress,
    )  # fmt: skip
    details = loop.run(task)
    return Training(state_of(prepared.module), details)


def control(
    prepared: Prepared,
    loader: Loader,
    loss: Loss,
    settings: Qat,
    *,
    seed: int,
    score: Score | None = None,
    make_optimizer: MakeOptimizer | None = None,
    kept: Checkpoints | None = None,
    ranks: Ranks = ALONE,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Train the float program by the same steps, seed and data: what of a gain is more training, not quantization.

    Its weights are used for nothing else. Returns its details, with the metrics before and after.
    """
    module = graph.copied(prepared.program.module)
    with ranks.failing_together():
        before = score(module) if score and ranks.first else None
    task = loop.Task(
        module, prepared.program.signature, loader, loss, settings, seed,
        score=score, make_optimizer=make_optimizer, kept=kept, ranks=ranks, progress=progress, label="float control",
    )  # fmt: skip
    details = loop.run(task)
    with ranks.failing_together():
        if score and ranks.first:
            details |= {"metrics_before": before, "metrics_after": score(module)}
    return details


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trained state on the CPU. StageError where a weight or a range is not finite, or no range was ever seen."""
    state = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    fakes = {id(fake) for fake in ranges.fakes(module)}
    unseen = [name for name, m in module.named_modules() if id(m) in fakes and not _seen(m)]
    bad = [name for name, value in state.items() if value.is_floating_point() and bool(torch.isnan(value).any())]
    if bad or unseen:
        what = f"the trained value '{bad[0]}' is NaN" if bad else f"no data went through '{unseen[0]}' in training"
        raise StageError(
            what, where="the trained model",
            todo="train with finite values" if bad else "call the model in train() mode, so that its ranges follow",
        )  # fmt: skip
    return state


def _seen(fake: torch.nn.Module) -> bool:
    observer = fake.activation_post_process
    return observer.min_val.numel() > 0 and bool((observer.min_val <= observer.max_val).all())
