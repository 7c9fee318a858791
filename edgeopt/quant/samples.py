"""Calibration samples that are looked at more than once, held in memory within bounds."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from edgeopt.program import ExportedGraph, Signature, fakes
from edgeopt.program import batches as _batches

HELD_ELEMENTS = 1 << 26  # of inputs, 256 MiB of float32: the first batches of the stream
# Of the values that stand in memory while a program is walked through, 1 GiB of float32. About four of the largest
# tensor are there at once: what a layer reads and writes, each as float and as rounded.
WALKED_ELEMENTS = 1 << 28
TENSORS_AT_ONCE = 4

Batch = list[torch.Tensor]  # positional inputs


def held(batches: Iterable[Any], signature: Signature, *, limit: int) -> tuple[list[Batch], Iterator[Any]]:
    """The first of at most `limit` batches as tensors, and a stream of all of them, those first ones included.

    operator.length_hint of the stream is how many batches the loader says that it has, as of the loader itself.
    """
    expected = min(limit, operator.length_hint(batches, limit))
    stream = itertools.islice(batches, limit)
    kept: list[Batch] = []
    named: list[Any] = []
    elements = 0
    for batch in stream:
        tensors = _batches.to_tensors(batch, signature, where=f"calibration batch {len(named) + 1}")
        named.append(batch)
        elements += sum(t.numel() for t in tensors)
        if elements > HELD_ELEMENTS and kept:
            break
        kept.append(tensors)
    return kept, _Counted(itertools.chain(named, stream), expected)


class _Counted(Iterator):
    """An iterator of about `expected` items."""

    def __init__(self, items: Iterator[Any], expected: int):
        self._items, self._left = items, expected

    def __length_hint__(self) -> int:
        return max(0, self._left)

    def __next__(self) -> Any:
        item = next(self._items)
        self._left -= 1
        return item


def spread(program: ExportedGraph, kept: Sequence[Batch]) -> list[Batch]:
    """Of every batch some samples, or some of the batches, so that a walk through the program stays within bounds.

    Deterministic and even: no part of the data is left out. A single batch becomes two. `program` carries its sizes
    in the nodes' metadata.
    """
    rows = sum(count(batch) for batch in kept)
    most = max(1, WALKED_ELEMENTS // (TENSORS_AT_ONCE * _largest(program)))
    step, free = -(-rows // most), by_rows(program.signature)
    if len(kept) == 1 and free and rows >= 2:  # two halves can be told apart
        kept = [[tensor[i::2] for tensor in kept[0]] for i in (0, 1)]
    if step <= 1:
        return list(kept)
    if free and min(count(batch) for batch in kept) >= 2 * step:
        return [[tensor[::step] for tensor in batch] for batch in kept]
    return list(kept[::step])


def count(batch: Batch) -> int:
    """How many samples a batch holds, by the first axis."""
    return batch[0].shape[0] if batch and batch[0].ndim else 1


def by_rows(signature: Signature) -> bool:
    """Whether the first axis of every input is one and the same, and free to be of any size."""
    first = {spec.shape[0] if spec.shape else 0 for spec in signature.inputs}
    return len(first) == 1 and all(isinstance(name, str) and signature.axes[name].min <= 2 for name in first)


def _largest(program: ExportedGraph) -> int:
    """Elements a sample of the largest value in the graph."""
    largest = 1
    for node in program.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.ndim:
            largest = max(largest, torch.Size(fakes.sizes(value)[1:]).numel())
    return largest
