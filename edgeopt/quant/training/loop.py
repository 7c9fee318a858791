"""The training loop: epochs of steps, evaluations between them, and checkpoints to go on from."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from edgeopt.errors import DataError, StageError
from edgeopt.program import Signature
from edgeopt.progress import SILENT, Progress, log
from edgeopt.quant import state as state_dict
from edgeopt.quant.training import checkpoints, randomness, ranges
from edgeopt.quant.training.batches import Batches, Loader, steps_of
from edgeopt.quant.training.optimizers import MakeOptimizer, Optimizer
from edgeopt.quant.training.ranks import ALONE, Ranks
from edgeopt.quant.training.step import Loss, Stepper
from edgeopt.spec.project import Qat

LOG_EVERY_S = 10.0

Score = Callable[[torch.nn.Module], dict[str, float]]
"""The module's metrics by the user's evaluate; higher is better."""


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how. `module` takes positional tensors and gives a flat tuple of tensors."""

    module: torch.fx.GraphModule
    signature: Signature
    loader: Loader
    loss: Loss
    settings: Qat
    seed: int
    score: Score | None = None
    make_optimizer: MakeOptimizer | None = None
    kept: checkpoints.Checkpoints | None = None
    ranks: Ranks = ALONE
    progress: Progress = SILENT
    label: str = "qat"


@dataclass
class _Run:
    """How far a training is: what a checkpoint holds beside weights, optimizer and random states."""

    total: int
    per_epoch: int
    epoch: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    best: dict[str, torch.Tensor] | None = None
    warnings: list[str] = field(default_factory=list)
    resumed_after: int = 0
    stopped: bool = False


def run(task: Task) -> dict[str, Any]:
    """Train `task.module` in place and leave it in its best state; returns details for the record.

    The same seed on the same machine gives the same weights bit for bit, also where the training was killed and
    taken up again at the end of an epoch. DataError for batches that cannot be used, StageError for a loss or
    a gradient that is not finite, SpaceError for a disk that is full.
    """
    if task.settings.device == "cuda" and not torch.cuda.is_available():
        raise StageError(
            "qat.device is cuda, and torch finds no GPU here", where="key 'qat.device'",
            todo="train on a machine with one, install a torch with CUDA, or write cpu",
        )  # fmt: skip
    with randomness.reproducible(task.seed):
        batches = Batches(task.loader, task.signature, task.ranks, task.settings.device)
        task.module.to(task.settings.device)
        try:
            return _run(task, batches)
        finally:
            task.module.to("cpu")


def _run(task: Task, batches: Batches) -> dict[str, Any]:
    saved = _saved(task)
    state = _Run(**saved["run"]) if saved else _fresh(task, batches)
    batches.per_epoch = state.per_epoch
    batches.warnings = state.warnings
    _sort(task.module)
    weights = [p for p in task.module.parameters() if p.is_floating_point()]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = Optimizer(weights, task.settings, state.total, task.make_optimizer)
    scaler = torch.amp.GradScaler(task.settings.device) if task.settings.precision == "fp16" else None
    stepper = Stepper(task.module, task.signature, task.loss, optimizer, task.settings, task.ranks, scaler)
    if saved:
        _take_up(task, saved, state, optimizer, scaler)
    else:
        randomness.seed(task.seed)  # counting may have drawn random numbers
    started, before = time.perf_counter(), state.step
    with ranges.following(task.module, task.ranks), _Teller(task, state) as teller:
        while not _ended(task, state):
            _epoch(task, state, batches, stepper, teller)
            _evaluate(task, state, teller)
            _keep(task, state, optimizer, scaler)
    if state.best is not None:
        state_dict.load(task.module, state.best)
    seconds = time.perf_counter() - started
    return _details(task, state, seconds, state.step - before)


def _sort(module: torch.nn.Module) -> None:
    """Parameters in the order of their names: a program from the stage cache has them in another, and optimizers and
    processes know them by position."""
    for part in module.modules():
        part._parameters = dict(sorted(part._parameters.items()))
        part._modules = dict(sorted(part._modules.items()))


def _fresh(task: Task, batches: Batches) -> _Run:
    settings, most = task.settings, task.settings.max_steps
    count = batches.count(None if most is None else most * settings.accumulate)
    total = steps_of(count, settings.accumulate) * settings.epochs
    return _Run(min(total, most or total), count, warnings=batches.warnings)


def _epoch(task: Task, state: _Run, batches: Batches, stepper: Stepper, teller: _Teller) -> None:
    stream = batches.epoch(state.epoch + 1)
    with contextlib.closing(stream):
        while group := list(itertools.islice(stream, task.settings.accumulate)):
            if state.step and state.step / state.total >= task.settings.freeze_observers_at:
                ranges.freeze(task.module)
            state.losses.append(stepper.step(group, state.step))
            state.step += 1
            teller.step()
            if _steps_done(task, state):
                break
    state.epoch += 1


def _steps_done(task: Task, state: _Run) -> bool:
    return task.settings.max_steps is not None and state.step >= task.settings.max_steps


def _ended(task: Task, state: _Run) -> bool:
    return state.stopped or state.epoch >= task.settings.epochs or _steps_done(task, state)


def _evaluate(task: Task, state: _Run, teller: _Teller) -> None:
    """Every so many epochs and after the last one: the metric, the best state, and whether to stop."""
    every = task.settings.evaluate_every
    if not every or task.score is None or not (_ended(task, state) or state.epoch % every == 0):
        return
    value = None
    with task.ranks.failing_together():
        if task.ranks.first:
            value = _score(task, state)
    value = task.ranks.from_first(value)
    best = max((m["value"] for m in state.metrics), default=None)
    state.metrics.append({"epoch": state.epoch, "value": value})
    teller.metric = value
    if best is None or value > best:
        state.best_epoch = state.epoch
        state.best = {name: t.detach().cpu().clone() for name, t in task.module.state_dict().items()}
        return
    since = sum(m["epoch"] > state.best_epoch for m in state.metrics)
    state.stopped = task.settings.patience is not None and since >= task.settings.patience


def _score(task: Task, state: _Run) -> float:
    states = randomness.states()  # what evaluate draws is no part of the training
    try:
        with ranges.still(task.module):
            found = task.score(task.module)
    except DataError as why:
        where = "; ".join(filter(None, [why.where, f"{task.label}, after epoch {state.epoch}"]))
        raise DataError(why.what, where=where, todo=why.todo) from why
    finally:
        randomness.restore(states)
    name = task.settings.metric or next(iter(found))
    if name not in found:
        raise DataError(
            f"evaluate gives no metric '{name}'", where="key 'qat.metric'", todo="one of: " + ", ".join(found)
        )
    return found[name]


def _keep(task: Task, state: _Run, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    every = task.settings.checkpoint_every
    if not every or task.kept is None or not (_ended(task, state) or state.epoch % every == 0):
        return
    random_states = task.ranks.gathered(randomness.states())
    with task.ranks.failing_together():
        if task.ranks.first:
            task.kept.write(
                {
                    "run": vars(state),
                    "weights": task.module.state_dict(),
                    "optimizer": optimizer.state(),
                    "scaler": scaler.state_dict() if scaler else None,
                    "random": random_states,
                }
            )


def _saved(task: Task) -> dict[str, Any] | None:
    """The checkpoint to go on from; of several processes, all take that of the first."""
    if task.kept is None:
        return None
    data = task.ranks.from_first(task.kept.read() if task.ranks.first else None)
    return checkpoints.loaded(data) if data is not None else None


def _take_up(task: Task, saved: dict[str, Any], state: _Run, optimizer: Optimizer, scaler: Any) -> None:
    try:
        state_dict.load(task.module, saved["weights"])
        optimizer.load(saved["optimizer"])
    except (RuntimeError, ValueError, KeyError) as why:
        raise StageError(
            f"the checkpoint does not fit: {str(why)[:300]}", where=str(task.kept.folder),
            todo="remove that folder, and build again",
        ) from why  # fmt: skip
    if scaler is not None:
        scaler.load_state_dict(saved["scaler"])
    randomness.restore(saved["random"][task.ranks.rank])
    state.resumed_after = state.epoch
    if task.ranks.first:
        log.info("%s: goes on after epoch %d of %d", task.label, state.epoch, task.settings.epochs)


class _Teller:
    """A bar with loss, metric and time left; without a terminal a line now and then."""

    def __init__(self, task: Task, state: _Run):
        self._task, self._state = task, state
        self._started = self._last = time.perf_counter()
        self._from = state.step
        self.metric: float | None = state.metrics[-1]["value"] if state.metrics else None

    def __enter__(self) -> _Teller:
        self._bar = self._task.progress.bar(self._task.label, self._state.total) if self._task.ranks.first else None
        self._advance = self._bar.__enter__() if self._bar else lambda amount, label=None: None
        self._advance(self._state.step)
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._bar:
            self._bar.__exit__(*failure)

    def step(self) -> None:
        state, now = self._state, time.perf_counter()
        words = f"loss {state.losses[-1]:.4g}"
        if self.metric is not None:
            words += f", {self._task.settings.metric or 'metric'} {self.metric:.4g}"
        self._advance(1, f"{self._task.label}, {words}")
        if now - self._last >= LOG_EVERY_S and state.step < state.total and self._task.ranks.first:
            self._last = now
            left_s = (now - self._started) / (state.step - self._from) * (state.total - state.step)
            log.info(
                "%s: step %d of %d, %s, about %.0f s left", self._task.label, state.step, state.total, words, left_s
            )


def _details(task: Task, state: _Run, seconds: float, steps: int) -> dict[str, Any]:
    losses = state.losses
    part = max(1, len(losses) // 10)
    found: dict[str, Any] = {
        "steps": state.step,
        "epochs": state.epoch,
        "seconds": round(seconds, 3),
        "first_loss": sum(losses[:part]) / part,  # means over a tenth of the steps
        "last_loss": sum(losses[-part:]) / part,
    }
    if state.metrics:
        found |= {"metrics": state.metrics, "best_epoch": state.best_epoch, "stopped_early": state.stopped}
    if state.resumed_after:
        found |= {"resumed_after_epoch": state.resumed_after, "seconds_are_of_steps": steps}
    if task.settings.precision != "fp32":
        found["precision"] = task.settings.precision
    if task.ranks.size > 1:
        found |= {"processes": task.ranks.size, "batches_of_each": state.per_epoch}
    return {**found, "warnings": list(state.warnings)}
