"""Deploy: push, prepare, validate, activate, under one lock; what fails leaves the device with what it had."""

from __future__ import annotations

from dataclasses import dataclass

from edgeopt import digest
from edgeopt.errors import DeviceError, EdgeoptError
from edgeopt.flows.activate import Activated, switch
from edgeopt.flows.place import Place, locked
from edgeopt.flows.prepare import Prepared, prepare_at
from edgeopt.flows.push import KEEP, Pushed, push_to
from edgeopt.flows.validate import How, Validated, validate_at
from edgeopt.ports.connection import Connection
from edgeopt.progress import SILENT, Progress, log
from edgeopt.runtime.artifact import Artifact


@dataclass(frozen=True)
class Deployed:
    """What each step did."""

    pushed: Pushed
    prepared: Prepared | None  # None where the artifact has no engine to build
    validated: Validated
    activated: Activated

    def as_dict(self) -> dict:
        report = self.validated.report.model_dump(mode="json")
        return digest.finite({
            "pushed": self.pushed.as_dict(), "prepared": self.prepared.as_dict() if self.prepared else None,
            "report": report, "activated": self.activated.as_dict(),
        })  # fmt: skip


def deploy(
    artifact: Artifact,
    connection: Connection,
    how: How | None = None,
    *,
    root: str | None = None,
    keep: int = KEEP,
    progress: Progress = SILENT,
    wait_s: float = 0,
) -> Deployed:
    """Push `artifact`, build its engines and measure it on the device, and activate it where it passes.

    An undecided check does not stop it, such as a metric whose project is not at hand; a device on which no
    candidate ran does, since nothing is proven then: DeviceError. What a step raises is raised here, and `current`
    then is what it was before. A release that failed stays staged, for a look at it, until newer releases displace
    it. `wait_s`: how long to wait for a lock that somebody else holds. See push, validate and activate for the errors.
    """
    root = root or artifact.manifest.root
    with locked(connection, root, artifact.manifest.name, step="deploy", wait_s=wait_s) as place:
        try:
            pushed = push_to(place, artifact, keep=keep, progress=progress, python=(how or How()).python)
            prepared = _prepared(place, artifact, how or How(), progress)
            validated = validate_at(place, artifact, how, progress=progress)
            validated.check()
            if validated.selection is None:
                raise _unproven(place, validated)
            return Deployed(pushed, prepared, validated, switch(place, place.state(), artifact.digest, step="deploy"))
        except EdgeoptError:
            log.warning("%s: %s was not activated", place.where, artifact.digest[:12])
            raise


def _prepared(place: Place, artifact: Artifact, how: How, progress: Progress) -> Prepared | None:
    """The engines; a device that builds none may still run another candidate, which validate finds out."""
    prepared = None
    try:
        prepared = prepare_at(place, artifact, python=how.python, progress=progress)
        if prepared is not None:
            prepared.check()
    except DeviceError as why:
        log.warning("%s", why.what)
    return prepared


def _unproven(place: Place, validated: Validated) -> DeviceError:
    return DeviceError(
        f"no candidate ran on the device, so nothing is proven: {validated.report.reason}", where=place.where,
        todo="run 'edgeopt prepare ARTIFACT HOST' for its engines; 'edgeopt activate' switches to the release unproven",
    )  # fmt: skip
