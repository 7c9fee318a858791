"""What a training leaves on disk at the end of an epoch, so that a killed one goes on from there.

A checkpoint is written beside its place, fsynced and renamed into it: what stands there is whole. It holds the key of
what it is a training of, and is taken by no other. It is read with weights_only: nothing in it can run code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgeopt import digest
from edgeopt.errors import EdgeoptError, SpaceError
from edgeopt.progress import log
from edgeopt.runtime.artifact import sync

_FILE = "checkpoint"
_SUM = 64  # characters of the sha256 before the state
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEPT = 3  # folders of killed trainings that nobody took up again


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoint of the training that `key` names, in `folder`."""

    folder: Path
    key: str

    def named(self, part: str) -> Checkpoints:
        """Those of another training that belongs to the same stage."""
        return Checkpoints(self.folder / part, f"{self.key}/{part}")

    def write(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint by `state`, of tensors and plain values.

        SpaceError on a full disk; the checkpoint before it then stays as it is.
        """
        buffer = io.BytesIO()
        torch.save({"key": self.key, **state}, buffer)
        data = buffer.getvalue()
        part = self.folder / (_FILE + ".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as file:
                file.write(digest.of_bytes(data).encode())
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.folder / _FILE)
            sync(self.folder)
        except OSError as why:
            part.unlink(missing_ok=True)
            raise _disk_error(why, self.folder, kept=(self.folder / _FILE).exists()) from why

    def read(self) -> bytes | None:
        """The bytes of a state, where it is one of this training; a damaged or foreign file is said and left."""
        try:
            data = (self.folder / _FILE).read_bytes()
        except OSError:
            return None
        data, sum_of = data[_SUM:], data[:_SUM]
        if digest.of_bytes(data).encode() != sum_of:
            log.warning("the checkpoint %s is damaged and is not used", self.folder / _FILE)
            return None
        try:
            key = loaded(data).get("key")
        except pickle.UnpicklingError as why:  # of an optimizer whose state is more than tensors and plain values
            log.warning("the checkpoint %s cannot be read safely and is not used: %.300s", self.folder / _FILE, why)
            return None
        if key != self.key:
            log.warning("the checkpoint %s is of another training and is not used", self.folder / _FILE)
            return None
        return data

    def remove(self) -> None:
        """Remove it, and those of other trainings that were killed long ago."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            others = sorted((p for p in self.folder.parent.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
            for old in others[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
            if not others:
                self.folder.parent.rmdir()


def loaded(data: bytes) -> dict[str, Any]:
    """The state in the bytes that `read` gives."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _disk_error(why: OSError, folder: Path, *, kept: bool) -> EdgeoptError:
    if why.errno in _FULL:
        after = "build again: it goes on from the last checkpoint, which is kept" if kept else "build again"
        return SpaceError(
            f"the disk is full, and training stops: {why.strerror}", where=str(folder),
            todo=f"free space and {after}; qat.checkpoint_every: 0 trains without checkpoints",
        )  # fmt: skip
    return EdgeoptError(f"cannot write: {why.strerror or why}", where=str(folder), todo="check its permissions")
