"""Calibration: batches are streamed through the prepared program, whose observers keep the ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from edgeopt.program import batches as _batches
from edgeopt.program.data import empty
from edgeopt.progress import SILENT, Progress
from edgeopt.quant.prepare import Prepared

# What is handed back of the first batches, for bias correction: it holds these samples' activations in memory.
KEPT_SAMPLES = 16
KEPT_ELEMENTS = 16_000_000


def calibrate(
    prepared: Prepared, batches: Iterable[Any], *, limit: int, progress: Progress = SILENT
) -> list[list[torch.Tensor]]:
    """Run at most `limit` batches {input name: array}; returns the first few as positional tensors.

    One batch is in memory at a time, beside those few. DataError for an empty loader and for a batch that does not
    fit the signature or holds NaN or infinity.
    """
    signature = prepared.program.signature
    first: list[list[torch.Tensor]] = []
    room, elements, seen = KEPT_SAMPLES, KEPT_ELEMENTS, 0
    with torch.no_grad(), progress.bar("calibrating", limit) as advance:
        for batch in itertools.islice(batches, limit):
            seen += 1
            tensors = _batches.to_tensors(batch, signature, where=f"calibration batch {seen}")
            prepared.module(*tensors)
            advance(1)
            elements -= sum(t.numel() for t in tensors)
            if room > 0 and elements >= 0:
                first.append([t.clone() for t in tensors])
                room -= tensors[0].shape[0] if tensors[0].ndim else 1
    if not seen:
        raise empty("calibration")
    return first
