"""The project's calibration and training functions, called and their batches checked."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from edgeopt.errors import DataError
from edgeopt.ports import user_code
from edgeopt.program import batches
from edgeopt.program.program import Signature
from edgeopt.spec.project import Project


def calibration_batches(project: Project, signature: Signature) -> Iterator[dict[str, np.ndarray]]:
    """At most `project.calibration_batches` batches, checked, as {input name: array}; one is in memory at a time.

    What checks them again against the same signature finds that done (batches.Checked). Random numbers that the
    user's code draws start from the project's seed, so that the same batches come every time. DataError for an empty
    loader, and for a batch that does not fit the signature or holds NaN or infinity.
    """
    return _Calibration(project, signature)


class _Calibration(Iterator):
    """The user's calibration loader; operator.length_hint gives how many batches it says that it has."""

    def __init__(self, project: Project, signature: Signature):
        self._project, self._signature, self._seen = project, signature, 0
        self._draws = _Draws(project.seed)
        with self._draws:
            rows = Rows(call(project, "calibration"), project, "calibration")
            self._rows = iter(rows)
        most = project.calibration_batches
        self._expected = min(most, operator.length_hint(rows, most))

    def __length_hint__(self) -> int:
        return max(0, self._expected - self._seen)

    def __next__(self) -> dict[str, np.ndarray]:
        end = object()
        batch = end
        if self._seen < self._project.calibration_batches:
            with self._draws:
                batch = next(self._rows, end)
        if batch is end:
            if not self._seen:
                raise empty("calibration")
            raise StopIteration
        self._seen += 1
        where = f"key 'calibration': {self._project.calibration}, batch {self._seen}"
        return batches.Checked(batches.to_tensors(batch, self._signature, where=where), self._signature)


class _Draws:
    """Random generators that start from `seed` inside `with` blocks and go on there; outside they are as if unused."""

    def __init__(self, seed: int):
        self._seed = seed
        self._own: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        self._others = _random_states()
        if self._own is None:
            torch.manual_seed(self._seed)
            np.random.seed(self._seed % 2**32)  # noqa: NPY002  users' loaders draw from it
            random.seed(self._seed)
        else:
            _set_random_states(self._own)

    def __exit__(self, *why: object) -> None:
        self._own = _random_states()
        _set_random_states(self._others)


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


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
