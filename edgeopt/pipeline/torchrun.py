"""A build that `torchrun` started: the first process builds, the others help to train and leave.

    torchrun --nproc-per-node 4 -m edgeopt build --profile xavier

torchrun says in environment variables which process this is and where they meet: that is its protocol, and they are
read here and nowhere else. The first process says at the meeting place when training begins; the others then take
capture and optimize from the stage cache, or do these stages themselves where they have another disk, train in
step, and end. Where there is nothing to train, or the build fails before it, they end without.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from edgeopt.errors import StageError
from edgeopt.pipeline.job import Job

CALL = "edgeopt/call"  # 'train KEY' or 'leave'
LONGEST_BUILD = timedelta(hours=24)  # before training; torchrun ends the helpers where the first process dies
_LONGEST_JOIN = timedelta(minutes=30)


@dataclass(frozen=True)
class Place:
    """This process among those that torchrun started, and where they meet."""

    rank: int
    size: int
    address: str
    port: int
    local_rank: int  # among those of this machine
    hosted: bool  # whether torchrun itself keeps the meeting place

    def store(self) -> Any:
        """A torch.distributed store of all processes."""
        from torch.distributed import TCPStore

        first = self.rank == 0 and not self.hosted
        return TCPStore(self.address, self.port, None, first, timeout=_LONGEST_JOIN, wait_for_workers=False)


def place() -> Place | None:
    """Where this process stands; None where it is alone."""
    found = os.environ
    if not int(found.get("WORLD_SIZE", "1")) > 1 or "MASTER_PORT" not in found:
        return None
    hosted = found.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    rank = int(found["RANK"])
    return Place(
        rank, int(found["WORLD_SIZE"]), found["MASTER_ADDR"], int(found["MASTER_PORT"]),
        int(found.get("LOCAL_RANK", rank)), hosted,
    )  # fmt: skip


def helps() -> bool:
    """Whether this process only helps to train."""
    here = place()
    return here is not None and here.rank > 0


@contextlib.contextmanager
def helpers_leave() -> Iterator[None]:
    """For the first process: when the block ends, the others are let go, whether they have trained or not."""
    here = place()
    if here is None:
        yield
        return
    store = here.store()
    try:
        yield
    finally:
        if store.check([CALL]) is False:
            store.set(CALL, "leave")
        with contextlib.suppress(Exception):  # until they have read it, since the meeting place may end with us
            store.wait([f"edgeopt/left/{rank}" for rank in range(1, here.size)], timedelta(minutes=1))


@contextlib.contextmanager
def training(job: Job) -> Iterator[Any]:
    """The processes that train together, as `quant.training.ranks.Ranks`, for the time of the block."""
    from edgeopt.quant.training.ranks import ALONE, joined

    here, own = place(), job.project.qat
    if here is None or own.trainer or own.state:
        yield ALONE
        return
    store = here.store()
    if here.rank == 0:
        _call_helpers(store, here, job.key)
    from torch.distributed import PrefixStore

    meeting = PrefixStore("edgeopt/training", store)
    with joined(meeting, here.rank, here.size, device=own.device, local_rank=here.local_rank) as ranks:
        yield ranks


def _call_helpers(store: Any, here: Place, key: str) -> None:
    store.set(CALL, f"train {key}")
    for rank in range(1, here.size):
        try:
            store.wait([f"edgeopt/joins/{rank}"], _LONGEST_JOIN)
        except Exception as why:
            raise StageError(f"process {rank} did not join the training", where="torchrun", todo="see its log") from why
        answer = store.get(f"edgeopt/joins/{rank}").decode()
        if answer != key:
            raise StageError(
                f"process {rank} cannot join the training: {answer}", where="torchrun",
                todo="give every machine the same project, data and versions",
            )  # fmt: skip
