"""The user's training batches: counted, dealt to the processes of a training, and compared with those before.

An epoch may have more or fewer batches than the first one: training goes on, and the record says so. What cannot be
meant stops: an epoch without any batch, and a target that is suddenly of another kind.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from edgeopt.errors import DataError
from edgeopt.program import Signature
from edgeopt.program import batches as _batches
from edgeopt.program.data import empty
from edgeopt.quant.training.ranks import Ranks

Loader = Callable[..., Iterable[Any]]


class Batch(NamedTuple):
    """Positional input tensors, the target as the user gave it, and 'epoch 2, batch 7' for messages."""

    tensors: list[torch.Tensor]
    target: Any
    where: str


class Batches:
    """The batches of this process, epoch by epoch; `per_epoch` of them are expected.

    `loader` is called once an epoch. One that takes `rank` and `world_size` gives this process its own batches; of any
    other the batches are dealt in turns, and those of a last incomplete round are left out.
    """

    def __init__(self, loader: Loader, signature: Signature, ranks: Ranks, device: str = "cpu"):
        self._loader, self._signature, self._ranks, self._device = loader, signature, ranks, device
        self._own = takes_rank(loader)
        self._kind: Any = None
        self.per_epoch = 0
        self.warnings: list[str] = []

    def count(self, most: int | None) -> int:
        """Batches of an epoch, at most `most`; a loader without a length is run through. DataError for an empty one."""
        with self._ranks.failing_together():
            length = self._length(most)
            if not length:
                raise empty("train")
            mine = length if self._own else length // self._ranks.size
            if not mine:
                raise DataError(
                    f"{length} batches cannot be dealt to {self._ranks.size} processes", where="key 'train'",
                    todo="start fewer processes, or make the batches smaller",
                )  # fmt: skip
        self.per_epoch = min(self._ranks.gathered(mine))
        return self.per_epoch

    def _length(self, most: int | None) -> int:
        loader = self._call()
        try:
            return len(loader)  # type: ignore[arg-type]
        except TypeError:
            share = 1 if self._own else self._ranks.size
            return sum(1 for _ in itertools.islice(loader, None if most is None else most * share))

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of epoch `number`, from 1; warns where they are not as many as expected."""
        seen = 0
        for item in self._together(self._dealt()):
            seen += 1
            yield self._checked(item, f"epoch {number}, batch {seen} of {self.per_epoch}")
        if not seen:
            raise DataError(
                f"epoch {number} yields no batch", where="key 'train'",
                todo="return a new iterable each time; a generator that was used up yields nothing the second time",
            )  # fmt: skip
        if seen != self.per_epoch:
            self.warnings.append(f"epoch {number} had {seen} batches where {self.per_epoch} were expected")

    def _call(self) -> Iterable[Any]:
        if self._own:
            return self._loader(rank=self._ranks.rank, world_size=self._ranks.size)
        return self._loader()

    def _dealt(self) -> Iterator[Any]:
        if self._own or self._ranks.size == 1:
            yield from self._call()
            return
        stream = iter(self._call())
        while len(turn := list(itertools.islice(stream, self._ranks.size))) == self._ranks.size:
            yield turn[self._ranks.rank]

    def _together(self, stream: Iterator[Any]) -> Iterator[Any]:
        """The stream, ended for all processes where one of them has no more, and stopped where one fails."""
        end = object()
        while True:
            with self._ranks.failing_together():
                item = next(stream, end)
            if not self._ranks.all(item is not end):
                return
            yield item

    def _checked(self, item: Any, where: str) -> Batch:
        with self._ranks.failing_together():
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise DataError(
                    f"a training batch must be (inputs, target), not {type(item).__name__}", where=where,
                    todo="yield ({input name: array}, target)",
                )  # fmt: skip
            tensors = _batches.to_tensors(item[0], self._signature, where=where)
            kind = _kind(item[1])
            if self._kind is not None and kind != self._kind:
                raise DataError(
                    f"the target is {kind}, and was {self._kind} before", where=where,
                    todo="yield targets of one type and rank",
                )  # fmt: skip
            self._kind = kind
        return Batch([t.to(self._device) for t in tensors], moved(item[1], self._device), where)


def moved(value: Any, device: str) -> Any:
    """`value` with its tensors on `device`; arrays and all else stay as they are."""
    if device == "cpu":
        return value
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), value)


def steps_of(batches: int, accumulate: int) -> int:
    """Optimizer steps of an epoch; the last one may have fewer batches than the others."""
    return math.ceil(batches / accumulate)


def takes_rank(loader: Loader) -> bool:
    """Whether it makes the batches of one process itself: loader(rank=, world_size=)."""
    try:
        names = inspect.signature(loader).parameters
    except (TypeError, ValueError):
        return False
    return {"rank", "world_size"} <= set(names)


def _kind(target: Any) -> str:
    """What a target is, in words; equal for targets that one loss can take."""
    if isinstance(target, torch.Tensor):
        return f"a {str(target.dtype).removeprefix('torch.')} tensor of {target.ndim} dimensions"
    if isinstance(target, np.ndarray):
        return f"a {target.dtype} array of {target.ndim} dimensions"
    return f"a {type(target).__name__}"
