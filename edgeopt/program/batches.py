"""The user's batches, checked against the program's signature before a model sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from edgeopt.errors import DataError
from edgeopt.onboard.structure import flat_inputs
from edgeopt.program.program import Signature
from edgeopt.spec.values import did_you_mean


class Checked(dict):
    """A batch {input name: array} that was checked against `signature` already, and its positional tensors."""

    def __init__(self, tensors: list[torch.Tensor], signature: Signature):
        super().__init__(zip(signature.input_names, (t.numpy() for t in tensors), strict=True))
        self.tensors, self.signature = tensors, signature


def to_tensors(batch: Any, signature: Signature, *, where: str) -> list[torch.Tensor]:
    """A batch {input name: array or tensor}, flat or nested as forward takes its arguments, as positional tensors.

    DataError, which names `where` (as in 'calibration batch 3'), the input and the axis, for names, dtypes or shapes
    that are not the signature's, for axes outside their declared range, and for NaN and infinity.
    """
    if isinstance(batch, Checked) and batch.signature is signature:
        return batch.tensors
    if not isinstance(batch, Mapping):
        raise DataError(
            f"a batch must be a dict of input name to array, not {type(batch).__name__}", where=where,
            todo="yield {" + ", ".join(f"'{name}': ..." for name in signature.input_names) + "}",
        )  # fmt: skip
    try:
        batch = flat_inputs(signature.input_structure, signature.input_names, batch)
    except ValueError as why:
        raise DataError(
            str(why), where=where, todo="give the parts as forward takes them, or by dotted names"
        ) from None
    _check_names(batch, signature, where)
    tensors = [_tensor(batch[spec.name], f"{where}, input '{spec.name}'") for spec in signature.inputs]
    axes: dict[str, int] = {}
    for spec, tensor in zip(signature.inputs, tensors, strict=True):
        _check_tensor(spec, tensor, signature, axes, f"{where}, input '{spec.name}'")
    return tensors


def _check_names(batch: Mapping, signature: Signature, where: str) -> None:
    missing = [name for name in signature.input_names if name not in batch]
    unknown = [str(name) for name in batch if name not in signature.input_names]
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown {', '.join(unknown)}"] if unknown else []
        near = did_you_mean(unknown[0], missing) if unknown else None
        raise DataError(
            f"the batch {' and '.join(parts)}" + (f", did you mean '{near}'?" if near else ""), where=where,
            todo="name the inputs as the project does: " + ", ".join(signature.input_names),
        )  # fmt: skip


def _tensor(value: Any, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError) as why:
        raise DataError(f"not an array: {why}", where=where, todo="yield numpy arrays or torch tensors") from None


def _check_tensor(spec, tensor: torch.Tensor, signature: Signature, axes: dict[str, int], where: str) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != spec.dtype:
        frames = "; an input with 'camera' is given as frames, which the artifact prepares itself"
        todo = "convert it" + (frames if spec.dtype == "uint8" else "")
        raise DataError(f"the dtype is {dtype} where {spec.dtype} is declared", where=where, todo=todo)
    if tensor.ndim != len(spec.shape):
        raise DataError(
            f"the shape {tuple(tensor.shape)} has {tensor.ndim} dimensions where {tuple(spec.shape)} has "
            f"{len(spec.shape)}", where=where, todo="give batches of the declared shape, batch axis included",
        )  # fmt: skip
    for index, (size, declared) in enumerate(zip(tensor.shape, spec.shape, strict=True)):
        _check_size(index, size, declared, signature, axes, where)
    if tensor.is_floating_point() and tensor.numel():
        if all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):  # one pass: a NaN anywhere is both ends
            return
        kind = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
        raise DataError(f"it holds {kind}", where=where, todo="remove or mend that sample")


def _check_size(index: int, size: int, declared, signature: Signature, axes: dict[str, int], where: str) -> None:
    if isinstance(declared, int):
        if size != declared:
            raise DataError(
                f"dimension {index} is {size} where {declared} is declared", where=where,
                todo="give batches of the declared shape, or declare the dimension as an axis",
            )  # fmt: skip
        return
    axis = signature.axes[declared]
    if not axis.min <= size <= axis.max:
        raise DataError(
            f"axis '{declared}' (dimension {index}) is {size}, outside its range {axis.min} to {axis.max}",
            where=where, todo=f"give smaller or larger batches, or widen axes.{declared} in the project",
        )  # fmt: skip
    if axes.setdefault(declared, size) != size:
        raise DataError(
            f"axis '{declared}' (dimension {index}) is {size} here and {axes[declared]} in an earlier input",
            where=where, todo="give all inputs of a batch the same size along it",
        )  # fmt: skip
