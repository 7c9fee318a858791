"""How the project's named inputs reach the model's `forward`: by keyword, never by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from edgeopt.errors import DataError, ProjectError
from edgeopt.program import Signature
from edgeopt.spec.manifest import Axis, TensorSpec
from edgeopt.spec.project import Project
from edgeopt.spec.values import did_you_mean


def input_specs(project: Project) -> tuple[TensorSpec, ...]:
    """The project's inputs, in its order."""
    return tuple(
        TensorSpec(name=name, dtype=given.dtype, shape=tuple(given.shape)) for name, given in project.inputs.items()
    )


def value_ranges(project: Project) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each input that declares them."""
    return {
        name: (float(given.values[0]), float(given.values[1]))
        for name, given in project.inputs.items()
        if given.values is not None
    }


def batch_axis(signature: Signature) -> str | None:
    """The axis that every input has first, and only there; None where there is none."""
    first = {spec.shape[0] if spec.shape else None for spec in signature.inputs}
    if len(first) != 1:
        return None
    (name,) = first
    later = {size for spec in signature.inputs for size in spec.shape[1:]}
    return name if isinstance(name, str) and name not in later else None


def parameters(forward: Callable) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())


def check_parameters(parameters: list[inspect.Parameter], specs: tuple[TensorSpec, ...], *, where: str) -> None:
    """Refuse inputs that are no parameter of forward, and required parameters that have no input (ProjectError)."""
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    unnamed += [f"*{p.name}" for p in parameters if p.kind is p.VAR_POSITIONAL and not by_name]
    if unnamed:
        raise ProjectError(
            f"forward takes '{unnamed[0]}' by position only, and inputs are given by name", where=where,
            todo="wrap the model in a module whose forward names its inputs",
        )  # fmt: skip
    given = [spec.name for spec in specs]
    for name in given:
        if name not in by_name and not takes_any:
            near = did_you_mean(name, [n for n in by_name if n not in given])
            raise ProjectError(
                f"the input '{name}' is no parameter of forward" + (f", did you mean '{near}'?" if near else ""),
                where=f"key 'inputs.{name}'; {where}", todo="forward takes: " + (", ".join(by_name) or "nothing"),
            )  # fmt: skip
    for p in parameters:
        if p.name in by_name and p.default is p.empty and p.name not in given:
            raise ProjectError(
                f"forward needs '{p.name}', and the project has no such input", where=f"key 'inputs'; {where}",
                todo=f"add '{p.name}' with its shape and dtype to 'inputs'",
            )  # fmt: skip


def check_batch(
    batch: Any, specs: tuple[TensorSpec, ...], axes: dict[str, Axis], *, where: str
) -> dict[str, np.ndarray]:
    """A batch of the user's data as named arrays that fit the declared inputs, else DataError.

    Values may be arrays or tensors; names, dtypes, shapes and the ranges of axes must fit, and floats be finite.
    """
    if not isinstance(batch, dict):
        raise DataError(
            f"a batch must be a dict of input name to array, and is a {type(batch).__name__}", where=where,
            todo="yield {" + ", ".join(f"'{s.name}': ..." for s in specs) + "}",
        )  # fmt: skip
    _check_names(batch, specs, where)
    arrays = {spec.name: _array(batch[spec.name], spec, where) for spec in specs}
    sizes: dict[str, int] = {}
    for spec in specs:
        _check_shape(arrays[spec.name], spec, axes, sizes, where)
    return arrays


def _check_names(batch: dict, specs: tuple[TensorSpec, ...], where: str) -> None:
    names = [spec.name for spec in specs]
    for key in batch:
        if key not in names:
            near = did_you_mean(str(key), names)
            raise DataError(
                f"a batch has '{key}', which is no input" + (f", did you mean '{near}'?" if near else ""),
                where=where, todo="the inputs are: " + ", ".join(names),
            )  # fmt: skip
    for name in names:
        if name not in batch:
            raise DataError(f"a batch lacks the input '{name}'", where=where, todo="add it to every batch")


def _array(value: Any, spec: TensorSpec, where: str) -> np.ndarray:
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    if array.dtype.name != spec.dtype:
        raise DataError(
            f"'{spec.name}' is {array.dtype.name} and the project says {spec.dtype}", where=where,
            todo=f"convert it to {spec.dtype}, or correct 'inputs.{spec.name}.dtype'",
        )  # fmt: skip
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(
            f"'{spec.name}' holds NaN or infinity",
            where=where,
            todo="leave such samples out, or mend how they are made",
        )
    return array


def _check_shape(array: np.ndarray, spec: TensorSpec, axes: dict[str, Axis], sizes: dict[str, int], where: str) -> None:
    fits = array.ndim == len(spec.shape)
    for size, wanted in zip(array.shape, spec.shape, strict=False):
        if isinstance(wanted, int):
            fits = fits and size == wanted
        else:
            fits = fits and axes[wanted].min <= size <= axes[wanted].max and sizes.setdefault(wanted, size) == size
    if not fits:
        ranges = ", ".join(f"{n} {axes[n].min}..{axes[n].max}" for n in spec.shape if isinstance(n, str))
        raise DataError(
            f"'{spec.name}' has the shape {list(array.shape)}, which does not fit {list(spec.shape)}"
            + (f" with {ranges}" if ranges else ""),
            where=where, todo="correct the data, or the shape and the axes in the project",
        )  # fmt: skip
