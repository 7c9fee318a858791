"""The user's `evaluate(predict) -> {metric: float}`: recorded once, replayed on outputs that a device
returned.

evaluate must be deterministic: it asks for the same inputs in the same order each time. Replaying checks that
by the digest of each input, so that a metric is never computed from answers to other questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgeopt import digest
from edgeopt.errors import DataError
from edgeopt.onboard.structure import flat_inputs
from edgeopt.ports.user_code import call as call_user_code
from edgeopt.runtime import metrics as _metrics
from edgeopt.runtime.metrics import Metric

Tensors = Mapping[str, np.ndarray]
Predict = Callable[[Tensors], dict[str, np.ndarray]]
Evaluate = Callable[[Predict], Mapping[str, Any]]

_KEY = "evaluate"


class Recording(NamedTuple):
    """What evaluate gave, and the inputs that it asked for, in order (copies of them)."""

    metrics: dict[str, float]
    calls: list[dict[str, np.ndarray]]
    complete: bool  # False where `most_bytes` cut the calls off: such calls cannot be replayed
    measured: dict[str, Metric] = {}  # the metrics with what is known of their samples
    samples: int = 0  # that evaluate asked for


class Replayed(NamedTuple):
    """What evaluate gave for recorded answers, and the samples that it asked for."""

    measured: dict[str, Metric]
    samples: int


def record(
    evaluate: Evaluate, predict: Predict, *, most_bytes: int | None = None, base: Path | None = None
) -> Recording:
    """Run `evaluate(predict)` and keep the inputs that it asks for, up to `most_bytes` of them.

    `base` is the project's folder, so that an error names the user's file and line. Raises DataError where
    evaluate raises, asks for nothing, or gives anything but finite numbers by name.
    """
    calls: list[dict[str, np.ndarray]] = []
    state = {"bytes": 0, "asked": 0, "samples": 0}

    def recorded(inputs: Tensors) -> dict[str, np.ndarray]:
        arrays = {name: np.array(value) for name, value in inputs.items()}
        state["asked"] += 1
        state["bytes"] += sum(array.nbytes for array in arrays.values())
        if most_bytes is None or state["bytes"] <= most_bytes:
            calls.append(arrays)
        outputs = predict(arrays)
        state["samples"] += _samples(arrays, outputs)
        return outputs

    measured = _metrics.read(_run(evaluate, recorded, base), state["samples"])
    if not state["asked"]:
        raise DataError("evaluate never called predict", where=f"key '{_KEY}'", todo="check that its data is not empty")
    whole = len(calls) == state["asked"]
    return Recording(_metrics.values(measured), calls, whole, measured, state["samples"])


def replay(
    evaluate: Evaluate, calls: Sequence[Tensors], outputs: Sequence[Tensors], *, base: Path | None = None
) -> dict[str, float]:
    """The metrics that `evaluate` gives when predict answers with `outputs`, one for each of the recorded
    `calls`.

    Raises DataError where evaluate asks for anything but exactly these inputs in this order.
    """
    return _metrics.values(replayed(evaluate, calls, outputs, base=base).measured)


def replayed(
    evaluate: Evaluate, calls: Sequence[Tensors], outputs: Sequence[Tensors], *, base: Path | None = None
) -> Replayed:
    """As `replay`, with what is known of the metrics' samples."""
    position = samples = 0

    def answer(inputs: Tensors) -> dict[str, np.ndarray]:
        nonlocal position, samples
        if position >= len(calls):
            raise _changed(f"it asks for more than the {len(calls)} recorded inputs")
        if input_digest(inputs) != input_digest(calls[position]):
            raise _changed(f"input {position} is not the recorded one")
        position += 1
        # a copy: evaluate may write into what it is given, and the outputs are used again
        given = {name: np.array(value) for name, value in outputs[position - 1].items()}
        samples += _samples(inputs, given)
        return given

    measured = _metrics.read(_run(evaluate, answer, base), samples)
    if position < len(calls):
        raise _changed(f"it asks for {position} of the {len(calls)} recorded inputs")
    return Replayed(measured, samples)


def taking_nested(evaluate: Evaluate, structure: Any, names: Sequence[str]) -> Evaluate:
    """`evaluate`, whose calls of predict may be nested by the signature's `structure` around the inputs `names`."""

    def nested(predict: Predict) -> Mapping[str, Any]:
        return evaluate(lambda inputs: predict(_flat(structure, names, inputs)))

    return nested


def _flat(structure: Any, names: Sequence[str], inputs: Any) -> Tensors:
    try:
        return flat_inputs(structure, names, inputs)
    except ValueError as why:
        raise DataError(
            f"'predict' was called with inputs that do not fit: {why}", where=f"key '{_KEY}'",
            todo="give the parts as forward takes them, or by dotted names",
        ) from None  # fmt: skip


def _samples(inputs: Tensors, outputs: Tensors) -> int:
    """The samples of one call: its batch where every output has as many rows as the first input, else 1."""
    rows = {np.shape(value)[:1] for value in (next(iter(inputs.values()), ()), *outputs.values())}
    return next(iter(rows))[0] if len(rows) == 1 and () not in rows else 1


def input_digest(inputs: Tensors) -> str:
    """sha256 over the names, dtypes, shapes and bytes of named arrays; their order does not count."""
    parts = []
    for name in sorted(inputs):
        array = np.asarray(inputs[name])
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        parts.append([name, array.dtype.name, list(array.shape), digest.of_bytes(data)])
    return digest.of_value(parts)


def _run(evaluate: Evaluate, predict: Predict, base: Path | None) -> object:
    return call_user_code(evaluate, predict, key=_KEY, base=base or Path.cwd(), error=DataError)


def _changed(what: str) -> DataError:
    return DataError(
        f"evaluate is not the one that was recorded, or not deterministic: {what}", where=f"key '{_KEY}'",
        todo="fix its order and its seed; after a change of its data build again",
    )  # fmt: skip
