"""Random states: seeded for a training, put back after it, and kept in checkpoints as plain values."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """Seed torch, numpy and Python, from whose global states users' loaders draw."""
    torch.manual_seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002
    random.seed(value)


def states() -> dict[str, Any]:
    """All of them as tensors and plain values."""
    kind, words, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    found = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def restore(found: dict[str, Any]) -> None:
    """Go on from `states`."""
    torch.set_rng_state(found["torch"])
    kind, words, position, has_gauss, gauss = found["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    version, words, gauss_next = found["python"]
    random.setstate((version, tuple(words), gauss_next))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(found["cuda"])


@contextlib.contextmanager
def reproducible(value: int) -> Iterator[None]:
    """Deterministic kernels and random states from the seed `value`; all as it was after the block."""
    before = states()
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # an aid to find bugs, which costs a pass over memory
    seed(value)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        restore(before)
