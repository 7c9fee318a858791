"""`edgeopt.load`: an artifact as a function of named numpy arrays, on this machine."""

from __future__ import annotations

from pathlib import Path

from edgeopt import onboard
from edgeopt.errors import DeviceError
from edgeopt.runtime.artifact import Artifact


def load(
    artifact: Path | str, candidate: str | None = None, *, threads: int | None = None, check_finite: bool = False
) -> onboard.Predictor:
    """Open an artifact, every file re-hashed, and return a Predictor of the chosen candidate.

        with edgeopt.load("digits.edgeopt") as predictor:
            outputs = predictor.predict({"image": array})

    `candidate` names it; else `selection.json` does; else the first that this machine can run. `predict` takes a
    parameter with parts nested ({"pair": (a, b)}) or by their names ({"pair.0": a, "pair.1": b}). It
    gives the user's output structure of numpy arrays, a dataclass as a dict; wrong inputs raise ValueError, with
    `check_finite` those that hold NaN or infinity too. The sizes that the project's `adaptive` declares are made
    ready here; `predictor.statistics()` tells how calls were served.
    Raises ArtifactError where a file is missing or has changed, or there is no such candidate; DeviceError
    where the runtime is not installed or refuses the file.
    """
    opened = Artifact.open(artifact)
    if candidate is None:
        selection = opened.selection()
        candidate = selection.candidate if selection else None
    if candidate is not None:
        opened.manifest.candidate(candidate)
    try:
        return onboard.load(opened.folder, candidate, threads, check_finite)
    except onboard.Failure as failure:
        raise DeviceError(
            f"the candidate cannot be loaded: {failure.message}", where=str(opened.folder),
            todo="install what is missing, or name another candidate",
        ) from failure  # fmt: skip
