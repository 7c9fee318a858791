"""The calls that bisect compares: their inputs, and the right answers to them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeopt.errors import DataError, ModelError
from edgeopt.flows.bisect_candidate import Machine, Tensors, run_in
from edgeopt.pipeline.cache import link_or_copy
from edgeopt.pipeline.job import Job
from edgeopt.ports.local import LocalConnection
from edgeopt.progress import log
from edgeopt.runtime.artifact import Artifact


@dataclass(frozen=True)
class Call:
    """Inputs, the right answer to them, and which call it is in words."""

    words: str
    inputs: Tensors
    wanted: Tensors


def calls_of(captured: Any, job: Job, machine: Machine, *, given: Path | None, against: Artifact | None) -> list[Call]:
    """The user's call, else the reference's and some of other sizes and values, each with the right answer.

    `given`: a .npz file with the call. `against`: the artifact whose answers are right; None for the model's own.
    """
    from edgeopt.backends.equality import cases
    from edgeopt.capture.capture import unoptimised

    if given is not None:
        asked = [(given.name, _read_inputs(given, captured.signature))]
    else:
        asked = [(case.words, case.inputs) for case in cases(captured)]
    if against is not None:
        answers = _answers_of(against, [inputs for _, inputs in asked], machine)
        return [Call(words, inputs, answer) for (words, inputs), answer in zip(asked, answers, strict=True)]
    model, calls = unoptimised(job.project), []
    for words, inputs in asked:
        try:
            calls.append(Call(words, inputs, model.answer(inputs).outputs))
        except ModelError:
            if given is not None:
                raise
            log.debug("the model does not take synthetic inputs %s", words)
    return calls


def _read_inputs(path: Path, signature: Any) -> Tensors:
    from edgeopt.program.predict import checked

    try:
        with np.load(path, allow_pickle=False) as stored:
            given = {name: stored[name] for name in stored.files}
    except (OSError, ValueError) as why:
        raise DataError(
            f"the inputs cannot be read: {why}", where=str(path), todo="write them with numpy.savez(FILE, name=array)"
        ) from why
    return checked(given, signature)


def _answers_of(artifact: Artifact, asked: Sequence[Tensors], machine: Machine) -> list[Tensors]:
    """What the artifact's chosen candidate gives on this machine."""
    manifest, selection = artifact.manifest, artifact.selection()
    candidate = manifest.candidate(selection.candidate) if selection else manifest.candidates[0]
    here = replace(machine, connection=LocalConnection(), python=sys.executable)
    interface = (manifest.inputs, manifest.outputs, manifest.op_libraries)
    with tempfile.TemporaryDirectory(dir=machine.scratch) as folder:
        for name in manifest.files:
            link_or_copy(artifact.path(name), Path(folder) / name)
        return run_in(Path(folder), candidate, interface, asked, here)
