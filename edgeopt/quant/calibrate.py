"""Calibration: batches are streamed through the prepared program, whose observers keep the ranges."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch

from edgeopt.program import batches as _batches
from edgeopt.program.data import empty
from edgeopt.progress import SILENT, Progress, log
from edgeopt.quant.prepare import Prepared

# What is handed back of the first batches, for bias correction: it holds these samples' activations in memory.
KEPT_SAMPLES = 16
KEPT_ELEMENTS = 16_000_000
FEW_SAMPLES = 8


def calibrate(
    prepared: Prepared, batches: Iterable[Any], *, limit: int, progress: Progress = SILENT
) -> list[list[torch.Tensor]]:
    """Run at most `limit` batches {input name: array}; returns the first few as positional tensors.

    One batch is in memory at a time, beside those few. A loader that ends before `limit` is no error: the bar then
    ends early too. DataError for an empty loader and for a batch that does not fit the signature or holds NaN or
    infinity, unless it was checked against it already.
    """
    signature = prepared.program.signature
    first: list[list[torch.Tensor]] = []
    room, elements, seen, samples = KEPT_SAMPLES, KEPT_ELEMENTS, 0, 0
    with torch.no_grad(), progress.bar("calibrating", _expected(batches, limit)) as advance:
        for batch in itertools.islice(batches, limit):
            seen += 1
            tensors = _batches.to_tensors(batch, signature, where=f"calibration batch {seen}")
            prepared.module(*tensors)
            advance(1)
            count = tensors[0].shape[0] if tensors[0].ndim else 1
            samples += count
            elements -= sum(t.numel() for t in tensors)
            if room > 0 and elements >= 0:
                first.append([t.clone() for t in tensors])
                room -= count
    if not seen:
        raise empty("calibration")
    if samples < FEW_SAMPLES:
        log.warning("calibrated on %d samples only: ranges of so few may not hold for others", samples)
    log.debug("calibrated on %d batches, %d samples", seen, samples)
    return first


def _expected(batches: Iterable[Any], limit: int) -> int:
    """How many batches will be run: fewer than `limit` where the loader says so, for the estimate of the time."""
    return min(limit, operator.length_hint(batches, limit))
