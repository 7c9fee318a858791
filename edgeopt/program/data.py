"""The project's calibration and training functions, called and their batches checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edgeopt.errors import DataError
from edgeopt.ports import user_code
from edgeopt.program import batches
from edgeopt.program.program import Signature
from edgeopt.spec.project import Project


def calibration_batches(project: Project, signature: Signature) -> Iterator[dict[str, np.ndarray]]:
    """At most `project.calibration_batches` batches, checked, as {input name: array}; one is in memory at a time.

    DataError for an empty loader, and for a batch that does not fit the signature or holds NaN or infinity.
    """
    stream = Rows(call(project, "calibration"), project, "calibration")
    seen = 0
    for batch in itertools.islice(stream, project.calibration_batches):
        seen += 1
        tensors = batches.to_tensors(batch, signature, where=f"key 'calibration': {project.calibration}, batch {seen}")
        yield {name: tensor.numpy() for name, tensor in zip(signature.input_names, tensors, strict=True)}
    if not seen:
        raise empty("calibration")


def guarded(project: Project, key: str) -> Callable[..., Any]:
    """The function that the project names under `key`; what it raises becomes a DataError with the user's own line."""
    function = user_code.load_attribute(getattr(project, key), project.folder, key=key, error=DataError)
    return lambda *args: user_code.call(function, *args, key=key, base=project.folder, error=DataError)


def call(project: Project, key: str) -> Any:
    """What the function under `key` returns: an iterable of batches."""
    return guarded(project, key)()


class Rows:
    """The user's iterable of batches; what their code raises meanwhile becomes a DataError with their own line."""

    def __init__(self, iterable: Any, project: Project, key: str):
        self._iterable = iterable
        self._guard = {"key": key, "base": project.folder, "error": DataError}

    def __len__(self) -> int:
        """TypeError where the iterable has no length."""
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        iterator = user_code.call(iter, self._iterable, **self._guard)
        end = object()
        while (item := user_code.call(next, iterator, end, **self._guard)) is not end:
            yield item


def empty(key: str) -> DataError:
    """The error for a loader without batches."""
    return DataError(
        f"the {key} loader yields no batch", where=f"key '{key}'",
        todo="check the paths that it reads; a generator that was used up yields nothing the second time",
    )  # fmt: skip
