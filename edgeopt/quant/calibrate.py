"""Calibration: batches are streamed through the prepared program, whose observers keep the ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from edgeopt.progress import SILENT, Progress
from edgeopt.quant import batches as _batches
from edgeopt.quant.data import empty
from edgeopt.quant.prepare import Prepared


def calibrate(prepared: Prepared, batches: Iterable[Any], *, limit: int, progress: Progress = SILENT) -> int:
    """Run at most `limit` batches {input name: array}; returns how many there were.

    One batch is in memory at a time. DataError for an empty loader and for a batch that does not fit the signature
    or holds NaN or infinity.
    """
    signature = prepared.program.signature
    seen = 0
    with torch.no_grad(), progress.bar("calibrating", limit) as advance:
        for batch in itertools.islice(batches, limit):
            seen += 1
            prepared.module(*_batches.to_tensors(batch, signature, where=f"calibration batch {seen}"))
            advance(1)
    if not seen:
        raise empty("calibration")
    return seen
