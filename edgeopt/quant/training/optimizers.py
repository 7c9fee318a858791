"""The optimizer and how its learning rate goes, from the project's settings or from a function of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from edgeopt.errors import StageError
from edgeopt.spec.project import Qat

MakeOptimizer = Callable[[list[torch.nn.Parameter]], Any]
"""The user's fn(parameters) -> optimizer, or (optimizer, scheduler), whose `step` is called after each step."""


class Optimizer:
    """An optimizer with its schedule; `state` and `load` are for checkpoints."""

    def __init__(self, parameters: list[torch.nn.Parameter], settings: Qat, total: int, make: MakeOptimizer | None):
        self.parameters = parameters
        self._settings, self._total = settings, total
        self._torch, self._scheduler = _made(parameters, settings, make)
        self._rates = [group["lr"] for group in self._torch.param_groups]

    @property
    def torch(self) -> torch.optim.Optimizer:
        return self._torch

    def prepare(self, step: int) -> None:
        """Set the learning rate of `step`, from 0, where the user's scheduler does not."""
        if self._scheduler is None:
            part = factor(step, self._total, self._settings)
            for group, rate in zip(self._torch.param_groups, self._rates, strict=True):
                group["lr"] = rate * part

    def step(self, scaler: torch.amp.GradScaler | None) -> None:
        """One step; with `scaler` none where a gradient is infinite."""
        if scaler is None:
            self._torch.step()
        else:
            scaler.step(self._torch)
            scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> dict[str, Any]:
        scheduler = self._scheduler.state_dict() if self._scheduler is not None else None
        return {"optimizer": self._torch.state_dict(), "scheduler": scheduler}

    def load(self, state: dict[str, Any]) -> None:
        self._torch.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])


def factor(step: int, total: int, settings: Qat) -> float:
    """The part of the highest learning rate at `step` of `total`, from 0: a rise, then the schedule down to 0.

    The cosine is that of Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.
    """
    warmup = min(settings.warmup_steps, total - 1)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min((step - warmup) / (total - warmup), 1.0)
    if settings.schedule == "constant":
        return 1.0
    return 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def _made(parameters: list[torch.nn.Parameter], settings: Qat, make: MakeOptimizer | None) -> tuple[Any, Any]:
    if make is None:
        return _by_name(parameters, settings), None
    made = make(parameters)
    optimizer, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(optimizer, torch.optim.Optimizer) or (scheduler is not None and not hasattr(scheduler, "step")):
        raise StageError(
            f"the optimizer function gave {_described(made)}", where=f"key 'qat.optimizer': {settings.optimizer}",
            todo="return a torch.optim.Optimizer, or (optimizer, scheduler)",
        )  # fmt: skip
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held <= {id(p) for p in parameters}:
        raise StageError(
            "the optimizer holds parameters that are not the model's",
            where=f"key 'qat.optimizer': {settings.optimizer}",
            todo="make it of the parameters that the function is given",
        )
    return optimizer, scheduler


def _by_name(weights: list[torch.nn.Parameter], settings: Qat) -> torch.optim.Optimizer:
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=rate, momentum=settings.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(weights, lr=rate, weight_decay=decay)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(item).__name__ for item in value) + ")"
    return f"a {type(value).__name__}"
