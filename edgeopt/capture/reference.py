"""The reference calls of a program: the user's data where there is some, else synthetic inputs.

The first has the sizes to tune for, so that the device can time it.
"""

from __future__ import annotations

import itertools

import numpy as np

from edgeopt.capture.guard import Model
from edgeopt.capture.inputs import batch_axis
from edgeopt.program import Call, Signature, data, graph
from edgeopt.spec.manifest import Axis
from edgeopt.spec.project import Project

SECOND_BATCH = 8  # reference calls travel with the artifact and are run on the device
_BATCHES = 2


def reference_calls(model: Model, signature: Signature, project: Project) -> tuple[Call, ...]:
    """At most two calls of the user's model, of different sizes where the axes allow it. Raises DataError."""
    if project.calibration is None:
        inputs = [graph.synthetic(signature, s, project.seed) for s in _synthetic_sizes(signature)]
    else:
        inputs = _calibration_inputs(signature, project)
    return tuple(Call(arrays, model.answer(arrays).outputs) for arrays in inputs)


def _synthetic_sizes(signature: Signature) -> list[dict[str, int]]:
    """The sizes to tune for, and the smallest; a larger batch where it is tuned for the smallest."""
    batch = batch_axis(signature)
    first, second = graph.sizes(signature, "opt"), graph.sizes(signature, "min")
    if batch is not None and first == second:
        second[batch] = min(signature.axes[batch].max, signature.axes[batch].min + 3)
    return [first] if first == second else [first, second]


def _calibration_inputs(signature: Signature, project: Project) -> list[dict[str, np.ndarray]]:
    given = list(itertools.islice(data.calibration_batches(project, signature), _BATCHES))
    batch = batch_axis(signature)
    if batch is None:
        return given
    pairs = zip(_batch_sizes(signature.axes[batch]), itertools.cycle(given), strict=False)
    return [_of_size(arrays, size) for size, arrays in pairs]


def _batch_sizes(axis: Axis) -> tuple[int, ...]:
    second = min(axis.max, max(axis.min, SECOND_BATCH))
    return tuple(dict.fromkeys((axis.opt, second if second != axis.opt else axis.min)))


def _of_size(arrays: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """The first `size` samples, repeated from the first where there are fewer."""
    return {name: np.take(array, range(size), axis=0, mode="wrap") for name, array in arrays.items()}
