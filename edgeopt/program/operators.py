"""The operators of a program in the order they run, with what each reads, writes and computes at given axis sizes.

One value for all kinds of programs: `walk` makes it of torch's, `onnx_walk` of ONNX files; costs, memory and branches
are figures over it, and drawings show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip

Kind = Literal["contraction", "other", "view", "constant", "unknown"]


@dataclass(frozen=True)
class Value:
    """A tensor that an operator reads or makes. `bytes`: its own, where an expanded axis counts once.

    `storage` numbers the memory that it lies in, which views share; None for weights and constants.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    storage: int | None


@dataclass(frozen=True)
class Operator:
    """One operator. `sources` are the positions of the operators whose results it needs.

    `kind`: 'contraction' (convolution, matmul, attention, recurrent layer), whose multiply-adds count as 2 FLOPs;
    'other', whose FLOPs are estimates; 'view', which moves no data; 'constant', a stored weight quantized or
    dequantized, which runtimes do once when they load; 'unknown', whose cost nobody told.
    """

    name: str
    op: str
    path: str
    sources: tuple[int, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    kind: Kind
    flops: int
    read_bytes: int
    written_bytes: int

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Weights:
    """Stored tensors of one dtype that the program reads, each counted once."""

    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Walk:
    """`storages`: bytes of each numbered storage. `notes`: what the figures leave out, and why."""

    sizes: dict[str, int]
    operators: tuple[Operator, ...]
    inputs: dict[str, Value]
    outputs: dict[str, tuple[Value, tuple[int, ...]]]  # with the operators that make each
    storages: dict[int, int]
    weights: tuple[Weights, ...]
    notes: tuple[str, ...] = ()


def short_dtype(dtype: str) -> str:
    """float32 as f32, and so on."""
    return _SHORT.get(dtype, dtype)


class Names:
    """A name for each operator that changes elsewhere do not touch: module path, operator, a number where it repeats.

    Names that a graph gives its own nodes are counted over the whole graph, so that one node less renames many.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def name(self, path: str, op: str) -> str:
        name = f"{path}:{op}" if path else op
        count = self._seen[name] = self._seen.get(name, 0) + 1
        return name if count == 1 else f"{name}.{count}"


class Builder:
    """A Walk, operator by operator.

    `by_memory`: who made a value is known by its memory alone, else `sources` say it, and memory only tells of
    operators that write to what they are given.
    """

    def __init__(self, sizes: dict[str, int], *, by_memory: bool = False):
        self._sizes = dict(sizes)
        self._by_memory = by_memory
        self._names = Names()
        self._operators: list[Operator] = []
        self._storages: dict[int, int] = {}
        self._writers: dict[int, int] = {}  # storage -> the operator that wrote to it last
        self._weights: dict[object, tuple[str, int, int]] = {}

    def storage(self, number: int, size_bytes: int) -> None:
        """Tell the size of a storage; storages grow."""
        self._storages[number] = max(size_bytes, self._storages.get(number, 0))

    def weight(self, key: object, dtype: str, elements: int, size_bytes: int) -> None:
        """Tell of a stored tensor; the same `key` again is the same tensor."""
        self._weights[key] = (dtype, elements, size_bytes)

    def add(
        self, op: str, path: str, inputs: Sequence[Value], outputs: Sequence[Value], *, flops: int, kind: Kind,
        sources: Iterable[int] = (), writes: bool = False, gathers: bool = False,
    ) -> int:  # fmt: skip
        """Append an operator and say its position. `sources` are further operators that it needs the results of.

        `writes`: it writes to memory that it was given. `gathers`: it reads of its first input only what it returns.
        """
        position = len(self._operators)
        found = {self._writers[v.storage] for v in inputs if v.storage in self._writers} | set(sources)
        read, written = _moved(inputs, outputs, gathers) if kind not in ("view", "constant") else (0, 0)
        self._operators.append(
            Operator(
                self._names.name(path, op), op, path, tuple(sorted(found)), tuple(inputs), tuple(outputs), kind,
                flops, read, written,
            )
        )  # fmt: skip
        given = {value.storage for value in inputs}
        for value in outputs:
            if value.storage is not None and (writes or self._by_memory and value.storage not in given):
                self._writers[value.storage] = position
        return position

    def sources_of(self, value: Value) -> tuple[int, ...]:
        """The operator that wrote the value's memory last."""
        return (self._writers[value.storage],) if value.storage in self._writers else ()

    def done(
        self, inputs: dict[str, Value], outputs: dict[str, tuple[Value, tuple[int, ...]]], notes: tuple[str, ...] = ()
    ) -> Walk:
        by_dtype: dict[str, Weights] = {}
        for dtype, elements, size in self._weights.values():
            was = by_dtype.get(dtype, Weights(dtype, 0, 0, 0))
            by_dtype[dtype] = dataclasses.replace(
                was, tensors=was.tensors + 1, elements=was.elements + elements, bytes=was.bytes + size
            )
        weights = tuple(sorted(by_dtype.values(), key=lambda w: (-w.bytes, w.dtype)))
        return Walk(self._sizes, tuple(self._operators), inputs, outputs, self._storages, weights, notes)


def _moved(inputs: Sequence[Value], outputs: Sequence[Value], gathers: bool) -> tuple[int, int]:
    """Bytes read and written by an operator that runs by itself: every input and every output once."""
    written = sum(value.bytes for value in outputs)
    distinct = {id(value): value for value in inputs}
    sizes = [value.bytes for value in distinct.values()]
    if gathers and sizes:
        sizes[0] = min(sizes[0], written)
    return sum(sizes), written
