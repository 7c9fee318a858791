"""Which sizes an artifact serves fast, and the proof that padding an axis with zeros changes no answer of the model.

The proof is by trial, on the unoptimised model: calls of many sizes, padded and cut back by the very code that the
device runs, must give what the calls themselves give. Inputs are tried positive, of both signs and negative: zeros
behind positive values are invisible to a maximum and not behind negative ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgeopt.errors import DataError, EdgeoptError, first_line
from edgeopt.onboard.padding import Padding
from edgeopt.program import Program, Signature
from edgeopt.program.predict import predictor
from edgeopt.progress import log
from edgeopt.runtime import compare
from edgeopt.spec.adaptive import Adaptive
from edgeopt.spec.project import Project

TOLERANCE = 1e-4  # of the largest value of an output: kernels add in another order when a size differs
_DECLARED = 4  # sizes that are made ready, below which padding is tried


def adaptive(program: Program, project: Project) -> Adaptive | None:
    """The project's `adaptive` as the manifest has it: whole sizes, and no padding that was found to change answers.

    `program`: as captured, before anything was changed. None where the project has none.
    """
    asked = project.adaptive
    if asked is None:
        return None
    usual = {name: axis.opt for name, axis in program.signature.axes.items()}
    whole = asked.model_copy(update={"specialise": tuple(usual | sizes for sizes in asked.specialise)})
    if not asked.pad or not asked.pad_check:
        return whole
    if reason := unsafe(program, whole):
        log.warning("padding %s: left out, other sizes run on the dynamic graph: %s", ", ".join(asked.pad), reason)
        return whole.model_copy(update={"pad": {}})
    return whole


def unsafe(program: Program, asked: Adaptive) -> str | None:
    """Why padding changes an answer of the program, with the sizes at which it does; None where none was found to."""
    signature, predict = program.signature, _predict(program)
    pad = _padding(signature, asked)
    tried = 0
    for words, inputs in _calls(signature, asked):
        arrays = [inputs[spec.name] for spec in signature.inputs]
        padded = pad(*arrays)
        if padded is None:
            continue
        tried += 1
        larger, _, undo = padded
        try:
            found = undo(predict(list(larger)))
            wanted = predict(arrays)
            reason = _difference(signature, wanted, found)
        except (EdgeoptError, IndexError) as why:  # IndexError: an output that has lost the axis
            reason = first_line(why)
        if reason:
            return f"{words} {reason}"
    return None if tried else "no size within the axes' ranges can be padded"


def _predict(program: Program):
    run, signature = predictor(program), program.signature

    def predict(arrays: list[np.ndarray]) -> list[np.ndarray]:
        try:
            outputs = run(dict(zip(signature.input_names, arrays, strict=True)))
        except EdgeoptError:
            raise
        except Exception as why:  # whatever the graph's operators raise
            raise DataError(f"the model fails: {first_line(why)}") from why
        return [outputs[name] for name in signature.output_names]

    return predict


def _padding(signature: Signature, asked: Adaptive) -> Padding:
    return Padding(
        [spec.model_dump() for spec in signature.inputs], [spec.model_dump() for spec in signature.outputs],
        {name: axis.model_dump() for name, axis in signature.axes.items()}, asked.pad, asked.specialise,
    )  # fmt: skip


def _calls(signature: Signature, asked: Adaptive) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Words and inputs of the calls to try."""
    from edgeopt.program import graph

    for seed, sizes in enumerate(_sizes(signature, asked)):
        words = "at " + ", ".join(f"{name}={size}" for name, size in sizes.items())
        drawn = graph.synthetic(signature, sizes, seed)
        rng = np.random.default_rng(seed)
        normal = {name: rng.normal(0, 1, array.shape) for name, array in drawn.items() if array.dtype.kind == "f"}
        for values in ({}, normal, {name: -np.abs(array) for name, array in normal.items()}):
            limited = {name: _within(array, signature.values.get(name)) for name, array in values.items()}
            yield words, {name: np.asarray(limited.get(name, a), a.dtype) for name, a in drawn.items()}


def _within(array: np.ndarray, limits: tuple[float, float] | None) -> np.ndarray:
    return array if limits is None else np.clip(array, *limits)


def _sizes(signature: Signature, asked: Adaptive) -> list[dict[str, int]]:
    """Sizes just above a multiple, which are padded most, at the least, usual and largest; and below what is ready."""
    out = []
    for which in ("min", "opt", "max"):
        base = {name: getattr(axis, which) for name, axis in signature.axes.items()}
        out.append(base | {name: _above(base[name], asked.pad[name], signature.axes[name]) for name in asked.pad})
        out.append(base | {name: max(signature.axes[name].min, base[name] - 1) for name in asked.pad})
    for ready in asked.specialise[:_DECLARED]:
        out.append(ready | {name: max(signature.axes[name].min, ready[name] - 1) for name in asked.pad})
    return out


def _above(size: int, multiple: int, axis) -> int:
    """The size that lies one above a multiple, near `size` and within the axis."""
    below = (size - 1) // multiple * multiple + 1
    return min(axis.max, max(axis.min, below))


def _difference(signature: Signature, wanted: list[np.ndarray], found: list[np.ndarray]) -> str | None:
    for name, reference, value in zip(signature.output_names, wanted, found, strict=True):
        error = compare.output_error([reference], [value])
        if reason := compare.broken(name, error):
            return reason
        if error.max_rel > TOLERANCE:
            return f"output '{name}' differs by {error.max_rel:.2g} of its largest value"
    return None
