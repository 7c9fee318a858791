"""The processes that train together: torch.distributed over what `torchrun` starts, and one process alone.

Every process takes its own batches. Gradients are averaged by DistributedDataParallel, and each range that an
observer sees is that of all batches together, so that the training is that of one process with the joined batch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from edgeopt.errors import EdgeoptError, StageError

LONGEST_WAIT = timedelta(minutes=30)  # of one process for the others: the longest evaluation, or loading of a batch


@dataclass(frozen=True)
class Ranks:
    """This process among `size`; alone, everything here does nothing."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this one writes files and says what happens."""
        return self.rank == 0

    def wrapped(self, module: nn.Module, *, unused: bool) -> nn.Module:
        """The module as it is called in training: it averages gradients in backward.

        `unused`: whether some weights get no gradient, which has to be looked for in every step.
        """
        if self.size == 1:
            return module
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        # ranges are made equal where they are seen; of one step to the next nothing is to be copied (new name: 2.13)
        copied = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused, **{copied: False})

    def without_averaging(self, module: nn.Module) -> contextlib.AbstractContextManager:
        """For all but the last batch of an optimizer step."""
        return contextlib.nullcontext() if self.size == 1 else module.no_sync()

    def all(self, value: bool) -> bool:
        """Whether `value` is true in every process."""
        if self.size == 1:
            return value
        flag = torch.tensor([int(value)])
        self._reduce(flag, distributed.ReduceOp.MIN)
        return bool(flag)

    def range(self, least: torch.Tensor, greatest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest value over all processes."""
        both = torch.stack([-least, greatest])
        self._reduce(both, distributed.ReduceOp.MAX)
        return -both[0], both[1]

    def mean(self, value: float) -> float:
        """The mean of a figure over all processes."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        self._reduce(total, distributed.ReduceOp.SUM)
        return float(total) / self.size

    def from_first(self, value: Any) -> Any:
        """What the first process has; of the others' `value` nothing is kept. Plain values and bytes only."""
        if self.size == 1:
            return value
        box = [value if self.first else None]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """An error in the block stops every process, each with the message of the first that failed.

        It is a meeting point: all processes pass through the same blocks.
        """
        if self.size == 1:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except EdgeoptError as why:
            failure = why
        if self.all(failure is None):
            return
        messages = self.gathered(str(failure) if failure else None)
        if failure is not None:
            raise failure
        rank, message = next((rank, text) for rank, text in enumerate(messages) if text)
        raise StageError(f"training stops, since process {rank} failed: {message}", todo="see there")

    def _reduce(self, value: torch.Tensor, how: Any) -> None:
        if distributed.get_backend() == "nccl":  # which has no tensors of the CPU
            there = value.cuda()
            distributed.all_reduce(there, how)
            value.copy_(there)
        else:
            distributed.all_reduce(value, how)


ALONE = Ranks()


@contextlib.contextmanager
def joined(
    store: distributed.Store, rank: int, size: int, *, device: str = "cpu", local_rank: int = 0
) -> Iterator[Ranks]:
    """A process group for the time of the block; `store` is where its members meet.

    Over gloo, and with `device` cuda over NCCL, where each process of a machine has the GPU of its `local_rank`.
    """
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)
    try:
        yield Ranks(rank, size)
    finally:
        distributed.destroy_process_group()
