"""Quantization-aware training: the user's batches and loss on the fake-quantized program."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgeopt.errors import DataError, StageError
from edgeopt.program import Signature
from edgeopt.program import batches as _batches
from edgeopt.program.data import empty
from edgeopt.progress import SILENT, Progress, log
from edgeopt.quant import pt2e
from edgeopt.quant.prepare import Prepared
from edgeopt.runtime.structure import restore
from edgeopt.spec.project import Qat

LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class Training:
    """`state`: the fake-quantized program's state_dict, on the CPU; `details`: steps, seconds, first and last loss."""

    state: dict[str, torch.Tensor]
    details: dict[str, Any]


def train(
    prepared: Prepared,
    loader: Callable[[], Iterable[Any]],
    loss: Callable[[Any, Any], torch.Tensor],
    settings: Qat,
    *,
    seed: int,
    progress: Progress = SILENT,
) -> Training:
    """Train the weights of `prepared` (made with qat=True) and let the activations' ranges follow.

    `loader()` is called once an epoch and yields ({input name: array}, target); `loss(outputs, target)` gets the
    outputs in the user's own structure and gives a scalar. The learning rate falls along a cosine to 0; ranges stay
    after `freeze_observers_at` of the steps. The same seed on the same machine gives the same state bit for bit.
    DataError for an empty loader or a batch that does not fit; StageError for a loss that is not a finite scalar.
    """
    with _deterministic():
        _seed(seed)
        return _train(prepared, loader, loss, settings, progress, seed)


def _train(prepared: Prepared, loader, loss, settings: Qat, progress: Progress, seed: int) -> Training:
    module, signature = prepared.module, prepared.program.signature
    total = _steps(loader, settings)
    _seed(seed)  # counting may have drawn random numbers
    optimizer = _optimizer(module, settings)
    losses: list[float] = []
    ticker = _Ticker(total)
    with _training_mode(module), progress.bar("training", total) as advance:
        for item in itertools.islice(_items(loader, settings.epochs), total):
            done = len(losses) / total
            _set_rate(optimizer, settings.learning_rate, done)
            if done >= settings.freeze_observers_at:
                _freeze_ranges(module)
            where = f"training step {len(losses) + 1} of {total}"
            inputs, target = _split(item, where)
            tensors = _batches.to_tensors(inputs, signature, where=where)
            losses.append(_step(module, optimizer, tensors, target, loss, signature, where))
            advance(1)
            ticker.tell(losses)
    state = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    return Training(state, _details(losses, ticker))


def _step(module, optimizer, tensors, target, loss, signature: Signature, where: str) -> float:
    outputs = restore(signature.output_structure, list(module(*tensors)))
    value = loss(outputs, target)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise StageError(
            f"the loss is {_described(value)}, not a scalar tensor that depends on the outputs", where=where,
            todo="return a scalar tensor from 'loss', computed from the outputs with torch operators",
        )  # fmt: skip
    if not math.isfinite(float(value.detach())):
        raise StageError(
            f"the loss is {float(value.detach())}; nothing of this training is kept", where=where,
            todo="lower qat.learning_rate, or look for the batch or the logarithm of 0 that causes it",
        )  # fmt: skip
    optimizer.zero_grad(set_to_none=True)
    value.backward()
    optimizer.step()
    return float(value.detach())


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without gradient")
    return f"a {type(value).__name__}"


def _steps(loader: Callable[[], Iterable[Any]], settings: Qat) -> int:
    """The number of steps, which the schedule needs; a loader without a length is run through once to count."""
    first = loader()
    most = settings.max_steps
    try:
        length = len(first)  # type: ignore[arg-type]
    except TypeError:
        length = sum(1 for _ in itertools.islice(first, most))
    if not length:
        raise empty("train")
    return min(length * settings.epochs, most or length * settings.epochs)


def _items(loader: Callable[[], Iterable[Any]], epochs: int) -> Iterator[Any]:
    for _ in range(epochs):
        yield from loader()


def _split(item: Any, where: str) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"a training batch must be (inputs, target), not {type(item).__name__}", where=where,
            todo="yield ({input name: array}, target)",
        )  # fmt: skip
    return item[0], item[1]


def _optimizer(module: torch.nn.Module, settings: Qat) -> torch.optim.Optimizer:
    weights = [p.requires_grad_(True) for p in module.parameters() if p.is_floating_point()]
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=rate, momentum=settings.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(weights, lr=rate, weight_decay=decay)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float, done: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * (1 + math.cos(math.pi * done)) / 2


def _fakes(module: torch.nn.Module) -> Iterator[pt2e.FakeQuantizeBase]:
    return (m for m in module.modules() if isinstance(m, pt2e.FakeQuantizeBase))


def _freeze_ranges(module: torch.nn.Module) -> None:
    for fake in _fakes(module):
        fake.disable_observer()


@contextlib.contextmanager
def _training_mode(module: torch.nn.Module) -> Iterator[None]:
    """Let the ranges follow in the block only. The graph itself has no mode: it was captured for inference."""
    for fake in _fakes(module):
        fake.train()
    try:
        yield
    finally:
        for fake in _fakes(module):
            fake.eval()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  users' loaders draw from it
    random.seed(seed)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels in the block; the random states and the switch are as before after it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class _Ticker:
    """A line with loss and time left now and then, for logs and for those without a terminal."""

    def __init__(self, total: int):
        self.total, self.started = total, time.perf_counter()
        self._last = self.started

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def tell(self, losses: list[float]) -> None:
        now, done = time.perf_counter(), len(losses)
        if now - self._last >= LOG_EVERY_S and done < self.total:
            self._last = now
            left_s = self.seconds / done * (self.total - done)
            log.info("qat: step %d of %d, loss %.4g, about %.0f s left", done, self.total, losses[-1], left_s)


def _details(losses: list[float], ticker: _Ticker) -> dict[str, Any]:
    part = max(1, len(losses) // 10)
    return {
        "steps": len(losses),
        "seconds": round(ticker.seconds, 3),
        "first_loss": sum(losses[:part]) / part,  # means over a tenth of the steps
        "last_loss": sum(losses[-part:]) / part,
    }
