"""A candidate opened, here or on a device: the first value inside it that is not the program's."""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeopt.device.runner import Request, measure, scratch_folder
from edgeopt.errors import DeviceError, EdgeoptError
from edgeopt.pipeline import op_files
from edgeopt.ports.connection import Connection
from edgeopt.ports.local import LocalConnection
from edgeopt.progress import SILENT, Progress
from edgeopt.runtime.compare import Error
from edgeopt.runtime.tensors import PackWriter
from edgeopt.spec.manifest import Candidate, Tolerance
from edgeopt.spec.profile import Profile

Tensors = dict[str, np.ndarray]

_IN_A_ROUND = 7  # values that one file exposes: each keeps the runtime from fusing across it


@dataclass(frozen=True)
class Machine:
    """Where candidates are run: a connection, the Python there, and a scratch folder on this machine."""

    connection: Connection
    python: str
    scratch: Path
    progress: Progress = SILENT


@dataclass(frozen=True)
class Culprit:
    """The first wrong value: its node, the operator, where that stands in the user's model, and both values.

    Values are (shape, dtype, lowest, highest); `inputs` agree with what they should be. `max_rel`: the error by the
    largest value; None where the shapes differ.
    """

    node: str
    operator: str
    module: str
    line: str | None
    call: str
    wanted: Any
    found: Any
    inputs: tuple[Any, ...]
    max_abs: float | None
    max_rel: float | None

    @classmethod
    def of_difference(cls, difference: Any, call: str) -> Culprit:
        error: Error | None = difference.error
        return cls(
            difference.node, difference.operator, difference.module, difference.line, call, difference.wanted,
            difference.found, difference.inputs, error and error.max_abs, error and error.max_rel,
        )  # fmt: skip


def outputs(program: Any, candidate: Candidate, profile: Profile, inputs: Tensors, machine: Machine) -> Tensors:
    """What the candidate's runtime gives on the machine for a file of `program`, which is written anew.

    Raises DeviceError where the machine lacks the runtime or the candidate ends there, LoweringError where there is
    no file for the program.
    """
    from edgeopt.backends.inside import write

    with tempfile.TemporaryDirectory(dir=machine.scratch) as name:
        folder = Path(name)
        file = write(program, profile, candidate.runtime, folder)
        signature, written = program.signature, candidate.model_copy(update={"file": file})
        arch = platform.machine() if isinstance(machine.connection, LocalConnection) else profile.target.arch
        libraries, _ = op_files.put_for_target(program.custom_ops, arch, folder, [written], ())
        return run_in(folder, written, (signature.inputs, signature.outputs, libraries), [inputs], machine)[0]


def run_in(
    folder: Path, candidate: Candidate, interface: tuple[Any, Any, Sequence[str]], asked: Sequence[Tensors],
    machine: Machine,
) -> list[Tensors]:  # fmt: skip
    """The answers of a candidate whose file lies in `folder`, a scratch folder here, run by the machine's runner.

    `interface`: the inputs, the outputs and the op libraries. Raises DeviceError.
    """
    with PackWriter(folder / "feeds.bin", "feeds.bin") as pack:
        feeds = {str(i): {key: pack.add(array) for key, array in call.items()} for i, call in enumerate(asked)}
    inputs, outputs, libraries = interface
    with _there(machine.connection, folder) as place, tempfile.TemporaryDirectory(dir=machine.scratch) as answers:
        request = Request(
            folder=place, candidates=[candidate], inputs=inputs, outputs=outputs, feeds=feeds, op_libraries=libraries
        )
        response = measure(machine.connection, request, Path(answers), python=machine.python, progress=machine.progress)
        run = response.runs[candidate.name]
        if run.failure is not None:
            raise DeviceError(
                f"{candidate.name} cannot be run: {run.failure.kind}: {run.failure.message}",
                where=machine.connection.label, todo="install the runtime there, or name another --candidate",
            )  # fmt: skip
        return [response.outputs(candidate.name, feed) for feed in feeds]


@contextlib.contextmanager
def _there(connection: Connection, folder: Path) -> Iterator[str]:
    """The folder's path on the machine: itself here, a copy that goes afterwards elsewhere."""
    if isinstance(connection, LocalConnection):
        yield str(folder)
        return
    with scratch_folder(connection) as copy:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            inner = path.relative_to(folder)
            connection.run(["mkdir", "-p", f"{copy}/{inner.parent.as_posix()}"])
            connection.put(path, f"{copy}/{inner.as_posix()}")
        yield copy


def first_place(
    program: Any, candidate: Candidate, profile: Profile, inputs: Tensors, within: Tolerance, machine: Machine
) -> tuple[Culprit | None, str]:
    """The first value inside the candidate that is not the program's, and what else there is to say.

    The values are searched in rounds, each over a few of those between the last right and the first wrong one.
    """
    from edgeopt.backends.inside import inside
    from edgeopt.program.predict import predictor

    opened = inside(program)
    if opened is None:
        return None, "the program is TorchScript, whose values inside cannot be shown"
    low, high = -1, len(opened.places)  # the inputs are right, the outputs are not
    wrong: tuple[Any, Any, Any] | None = None
    while high - low > 1:
        chosen = _spread(low + 1, high)
        places = [opened.places[i] for i in chosen]
        try:
            shown = opened.exposed(places)
            found = outputs(shown, candidate, profile, inputs, machine)
        except EdgeoptError as why:
            return _culprit(wrong), f"between two rounds the file could not be run: {why.what}"
        wanted = predictor(shown)(inputs)
        first = next((i for i, place in zip(chosen, places, strict=True) if _wrong(place, wanted, found, within)), None)
        if first is None:
            if wrong is None and not _outputs_wrong(program, wanted, found, within):
                return None, _fused(opened.places[low + 1 : high])
            low = chosen[-1]
            continue
        place = opened.places[first]
        wrong = (place, wanted[place.output], found[place.output])
        high, low = first, max([low, *(i for i in chosen if i < first)])
    if wrong is None:
        return None, "every value inside is right, and only the outputs are not"
    return _culprit(wrong), ""


def _spread(start: int, end: int) -> list[int]:
    """At most `_IN_A_ROUND` numbers of start .. end - 1, evenly."""
    count = min(_IN_A_ROUND, end - start)
    return [start + (i + 1) * (end - start) // (count + 1) for i in range(count)]


def _wrong(place: Any, wanted: Tensors, found: Tensors, within: Tolerance) -> bool:
    from edgeopt.passes.difference import differs

    there, here = wanted[place.output], found[place.output]
    return there.shape != here.shape or differs(there, here, within) is not None


def _outputs_wrong(program: Any, wanted: Tensors, found: Tensors, within: Tolerance) -> bool:
    from edgeopt.runtime.compare import output_errors, reasons_against

    names = program.signature.output_names
    right, there = ({name: values[name] for name in names} for values in (wanted, found))
    return bool(reasons_against(output_errors([right], [there]), within))


def _culprit(wrong: tuple[Any, Any, Any] | None) -> Culprit | None:
    from edgeopt.program.intermediate import described
    from edgeopt.runtime.compare import output_error

    if wrong is None:
        return None
    place, wanted, found = wrong
    error = output_error([wanted], [found]) if wanted.shape == found.shape else None
    return Culprit(
        place.name, place.operator, place.module, place.line, "", described(place.name, wanted),
        described(place.name, found), (), error and error.max_abs, error and error.max_rel,
    )  # fmt: skip


def _fused(places: Sequence[Any]) -> str:
    names = ", ".join(place.name for place in places[:5]) + (", ..." if len(places) > 5 else "")
    return f"the fault goes where values inside are shown: it lies in how the runtime fuses operators among {names}"
