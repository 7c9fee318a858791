"""The sizes of what a part gives, from the sizes of what it takes: found by calls, proved by further ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgeopt.capture.declined import Declined
from edgeopt.capture.parts_calls import Recorded
from edgeopt.program.parts import Input, Output, Size

_PROOF = 3  # different sizes of an axis that a line through all of them needs: two fix it, the third may contradict

Shape = tuple[int, ...]
Call = tuple[list[Shape], Shape]  # the shapes of the inputs, the shape of one output


def inputs_of(calls: Sequence[Recorded]) -> tuple[Input, ...]:
    """The dtypes and shapes that the calls have in common."""
    found = []
    for tensors in zip(*(call.inputs for call in calls), strict=True):
        sizes = [set(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
        shape = tuple(next(iter(s)) if len(s) == 1 else None for s in sizes)
        found.append(Input(str(tensors[0].dtype).removeprefix("torch."), shape))
    return tuple(found)


def outputs_of(calls: Sequence[Recorded]) -> tuple[Output, ...]:
    """Each output's dtype, and each of its sizes as a constant, an input's size, or a line of one.

    Declined where the calls have sizes that are none of these.
    """
    found = []
    for index, tensors in enumerate(zip(*(call.outputs for call in calls), strict=True)):
        shapes = [
            ([tuple(t.shape) for t in call.inputs], tuple(o.shape)) for call, o in zip(calls, tensors, strict=True)
        ]
        shape = tuple(_size(index, axis, shapes) for axis in range(tensors[0].ndim))
        found.append(Output(str(tensors[0].dtype).removeprefix("torch."), shape))
    return tuple(found)


def _size(output: int, axis: int, calls: list[Call]) -> Size:
    sizes = [shape[axis] for _, shape in calls]
    if len(set(sizes)) == 1:
        return Size(0, 0, 0, sizes[0])
    axes = [(i, d) for i, shape in enumerate(calls[0][0]) for d in range(len(shape))]
    for i, d in axes:
        if [given[i][d] for given, _ in calls] == sizes:
            return Size(i, d, 1, 0)
    for i, d in axes:
        line = _line([(given[i][d], size) for (given, _), size in zip(calls, sizes, strict=True)])
        if line is not None:
            return Size(i, d, *line)
    seen = "; ".join(
        f"{_text(given)} gives {list(shape)}" for given, shape in dict((str(c), c) for c in calls).values()
    )
    raise Declined(f"the size {axis} of its output {output} is no line of one size of its inputs: {seen[:300]}")


def _line(points: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """(times, plus) of the line of whole numbers through all points, where there are enough to prove it."""
    value = dict(points)
    if len(value) < _PROOF or len(value) < len(set(points)):
        return None
    (x, y), (other, z), *_ = sorted(value.items())
    times = (z - y) // (other - x)
    plus = y - times * x
    return (times, plus) if times and all(times * at + plus == size for at, size in value.items()) else None


def _text(shapes: list[Shape]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
