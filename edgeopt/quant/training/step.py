"""One optimizer step: forward and backward of its batches, and what stops a training that has gone wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from edgeopt.errors import DataError, EdgeoptError, StageError
from edgeopt.program import Signature
from edgeopt.quant.training import not_finite, randomness, ranges
from edgeopt.quant.training.batches import Batch
from edgeopt.quant.training.optimizers import Optimizer
from edgeopt.quant.training.ranks import Ranks
from edgeopt.runtime.structure import restore
from edgeopt.spec.project import Qat

Loss = Callable[[Any, Any], torch.Tensor]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """Runs batches through `module` and steps the optimizer. The module gives a flat tuple of tensors."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        signature: Signature,
        loss: Loss,
        optimizer: Optimizer,
        settings: Qat,
        ranks: Ranks,
        scaler: torch.amp.GradScaler | None = None,
    ):
        self._module, self._signature, self._loss, self._optimizer = module, signature, loss, optimizer
        self._settings, self._ranks, self.scaler = settings, ranks, scaler
        self._called = module if ranks.size == 1 else None  # else once it is known which weights get gradients

    def step(self, batches: list[Batch], number: int) -> float:
        """Step `number`, from 0, over its batches; returns the mean of their losses over all processes."""
        if self._called is None:
            self._called = self._ranks.wrapped(self._module, unused=self._has_unused(batches[0]))
        self._optimizer.prepare(number)
        self._optimizer.torch.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            last = batch is batches[-1]
            with contextlib.nullcontext() if last else self._ranks.without_averaging(self._called):
                total += self._backward(batch, len(batches))
        self._check_gradients(batches)
        self._optimizer.step(self.scaler)
        return self._ranks.mean(total / len(batches))

    def _backward(self, batch: Batch, count: int) -> float:
        with self._autocast():
            flat = list(self._called(*batch.tensors))
            with self._ranks.failing_together():
                value = self._loss_of(flat, batch)
                found = float(value.detach())
                if not math.isfinite(found):
                    raise self._loss_not_finite(found, batch)
        value = value / count
        (self.scaler.scale(value) if self.scaler else value).backward()
        return found

    def _has_unused(self, batch: Batch) -> bool:
        """Whether the loss leaves weights without gradient; found by one backward whose gradients are dropped."""
        states = randomness.states()
        with self._ranks.failing_together(), ranges.still(self._module), self._autocast():
            self._loss_of(list(self._module(*batch.tensors)), batch).backward()
        randomness.restore(states)
        return not self._ranks.all(all(p.grad is not None for p in self._optimizer.parameters))

    def _loss_of(self, flat: list[torch.Tensor], batch: Batch) -> torch.Tensor:
        try:
            value = self._loss(restore(self._signature.output_structure, flat), batch.target)
        except Exception as why:  # the user's code
            raise _loss_failed(why, flat, batch) from why
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise StageError(
                f"the loss is {_described(value)}, not a scalar tensor that depends on the outputs", where=batch.where,
                todo="return a scalar tensor from 'loss', computed from the outputs with torch operators",
            )  # fmt: skip
        return value.reshape(())

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtype = _AUTOCAST.get(self._settings.precision)
        return torch.autocast(self._settings.device, dtype) if dtype else contextlib.nullcontext()

    def _check_gradients(self, batches: list[Batch]) -> None:
        """Clip the gradients, and stop where one is not finite; a scaler leaves such a step out instead."""
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer.torch)
        gradients = [p.grad for p in self._optimizer.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not math.isfinite(float(norm)):
            if self.scaler is not None:
                return
            raise self._gradient_not_finite(batches)
        if self._settings.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._optimizer.parameters, self._settings.clip_norm, norm)

    def _loss_not_finite(self, value: float, batch: Batch) -> StageError:
        with self._autocast():
            layer = not_finite.in_outputs(self._module, batch.tensors)
        source = f"; the first that is not finite is {layer}" if layer else "; all outputs of the model are finite"
        return StageError(
            f"the loss is {value}{source}", where=batch.where,
            todo="lower qat.learning_rate, set qat.clip_norm, or look for the logarithm of 0 that causes it; the last "
            "checkpoint is kept",
        )  # fmt: skip

    def _gradient_not_finite(self, batches: list[Batch]) -> StageError:
        layer = None
        for batch in batches:
            with self._autocast():
                layer = layer or not_finite.in_gradients(
                    self._module, batch.tensors, lambda flat, batch=batch: self._loss_of(flat, batch)
                )
        layer = next(filter(None, self._ranks.gathered(layer)), None)
        found = f"a gradient is not finite, and the loss is; backwards, the first is {layer}"
        return StageError(
            found if layer else f"the gradients are too large for float32; the largest is {self._largest_gradient()}",
            where=batches[-1].where,
            todo="lower qat.learning_rate, or look for a root or a quotient at 0; the last checkpoint is kept",
        )  # fmt: skip

    def _largest_gradient(self) -> str:
        found = {name: float(p.grad.abs().max()) for name, p in self._module.named_parameters() if p.grad is not None}
        name = max(found, key=found.get)
        return f"{found[name]:.2g}, of the weight '{name}'"


def _loss_failed(why: Exception, flat: list[torch.Tensor], batch: Batch) -> EdgeoptError:
    text = why.what if isinstance(why, EdgeoptError) else f"'loss' failed: {type(why).__name__}: {why}"
    where = batch.where + (f"; {why.where}" if isinstance(why, EdgeoptError) and why.where else "")
    labels = _labels(batch.target)
    if labels and ("out of bounds" in text or "out of range" in text):
        sizes = ", ".join(f"{n} for axis 1 of an output" for n in {t.shape[1] for t in flat if t.ndim > 1})
        return DataError(
            f"{text}; this batch has the labels {labels[0]} to {labels[1]}" + (f", with room {sizes}" if sizes else ""),
            where=where, todo="number the classes from 0 on, and see that the model has an output for each",
        )  # fmt: skip
    todo = why.todo if isinstance(why, EdgeoptError) else "correct it there; --debug shows the whole traceback"
    return DataError(text, where=where, todo=todo)


def _labels(target: Any) -> tuple[int, int] | None:
    """Lowest and highest label of a batch, where its target holds integers."""
    found = [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(target) if hasattr(leaf, "dtype")]
    found = [t for t in found if not t.is_floating_point() and t.dtype != torch.bool and t.numel()]
    return (min(int(t.min()) for t in found), max(int(t.max()) for t in found)) if found else None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without gradient")
    return f"a {type(value).__name__}"
