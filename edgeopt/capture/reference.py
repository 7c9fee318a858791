"""The reference calls of a program: the user's data where there is some, else synthetic inputs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from edgeopt.capture.guard import Model
from edgeopt.capture.inputs import batch_axis, check_batch
from edgeopt.errors import DataError, EdgeoptError
from edgeopt.ports import user_code
from edgeopt.program import Call, Signature, graph
from edgeopt.spec.project import Project

MAX_BATCH = 8  # reference calls travel with the artifact and are run on the device
_BATCHES = 2


def reference_calls(model: Model, signature: Signature, project: Project) -> tuple[Call, ...]:
    """At most two calls of the user's model, of different sizes where the axes allow it. Raises DataError."""
    if project.calibration is None:
        inputs = [graph.synthetic(signature, s, project.seed) for s in _synthetic_sizes(signature)]
    else:
        inputs = _calibration_inputs(signature, project)
    return tuple(Call(arrays, model.answer(arrays).outputs) for arrays in inputs)


def _synthetic_sizes(signature: Signature) -> list[dict[str, int]]:
    """The sizes to tune for, with the batch cut, and the smallest; a larger batch where it is tuned for 1."""
    batch = batch_axis(signature)
    first, second = graph.sizes(signature, "opt"), graph.sizes(signature, "min")
    if batch is not None:
        axis = signature.axes[batch]
        first[batch] = max(axis.min, min(first[batch], MAX_BATCH))
        if first == second:
            second[batch] = min(axis.max, axis.min + 3)
    return [first] if first == second else [first, second]


def _calibration_inputs(signature: Signature, project: Project) -> list[dict[str, np.ndarray]]:
    where = f"key 'calibration': {project.calibration}"
    function = user_code.load_attribute(project.calibration, project.folder, key="calibration")
    batches = [
        check_batch(batch, signature.inputs, signature.axes, where=f"{where}, batch {i}")
        for i, batch in enumerate(_first(function, project))
    ]
    if not batches:
        raise DataError("calibration gives no batches", where=where, todo="yield at least one batch")
    batch = batch_axis(signature)
    if batch is None:
        return batches
    smallest = signature.axes[batch].min
    return [_cut(signature, b, batch, limit) for b, limit in zip(batches, (MAX_BATCH, smallest), strict=False)]


def _first(function: Any, project: Project) -> list[Any]:
    given = user_code.call(function, key="calibration", base=project.folder, error=DataError)
    try:
        return list(itertools.islice(iter(given), _BATCHES))
    except EdgeoptError:
        raise
    except Exception as why:
        raise DataError(
            f"'calibration' failed: {type(why).__name__}: {why}",
            where=user_code.user_line(why, project.folder) or f"key 'calibration': {project.calibration}",
            todo="correct it there: it must return an iterable of {input name: array}",
        ) from why  # fmt: skip


def _cut(signature: Signature, arrays: dict[str, np.ndarray], axis: str, limit: int) -> dict[str, np.ndarray]:
    size = max(signature.axes[axis].min, limit)
    return {name: np.ascontiguousarray(array[:size]) for name, array in arrays.items()}
