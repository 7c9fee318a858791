"""Prepare: what only the device can make. Its TensorRT engines are built there, detached from this connection.

The device's own process builds them, so that a dropped connection or Ctrl-C costs nothing: asking again goes on.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

from edgeopt.errors import DeviceError, HostError, TransferError, UsageError
from edgeopt.flows.place import Place, locked
from edgeopt.flows.push import push_to
from edgeopt.ports.connection import Connection
from edgeopt.progress import SILENT, Advance, Progress, log
from edgeopt.runtime.artifact import Artifact
from edgeopt.runtime.zipapp import FILE_NAME as RUNNER
from edgeopt.spec.manifest import Manifest
from edgeopt.spec.values import Value, validate

POLL_S = 2.0
LOST_S = 120  # for so long a device that cannot be reached is tried again
_USAGE_STATUS = 2  # a runner that does not know the command


class Failure(Value):
    """Why an engine, or any of them, is not built: a kind, and one sentence for people."""

    kind: str
    message: str
    signal: int | None = None


class Engine(Value):
    """An engine on the device. `share` of its build from 0 to 1; seconds; `left_s` None where unknown."""

    candidate: str | None
    passport: str | None
    status: Literal["absent", "queued", "building", "interrupted", "failed", "ready"]
    stage: str | None = None
    share: float = 0.0
    elapsed_s: float | None = None
    left_s: float | None = None
    seconds: float | None = None  # that the build took
    size_bytes: int | None = None
    failure: Failure | None = None
    folder: str | None = None
    sha256: str | None = None  # of its file, where that was asked for

    @property
    def pending(self) -> bool:
        return self.status in ("queued", "building")


class _Answer(Value):
    root: str | None
    facts: dict[str, Any] | None
    failure: Failure | None
    engines: tuple[Engine, ...]


@dataclass(frozen=True)
class Prepared:
    """The engines of a release as they are now. `simulated`: what the device's stand-in for TensorRT says of itself."""

    name: str
    digest: str
    host: str
    engines: tuple[Engine, ...]
    facts: dict[str, Any]
    failure: Failure | None = None

    @property
    def simulated(self) -> str | None:
        return self.facts.get("simulated")

    @property
    def pending(self) -> bool:
        """Whether the device still builds."""
        return any(engine.pending for engine in self.engines)

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON data."""
        return {
            "name": self.name, "digest": self.digest, "host": self.host, "facts": self.facts,
            "failure": self.failure.model_dump() if self.failure else None,
            "engines": [engine.model_dump() for engine in self.engines], "simulated": self.simulated,
        }  # fmt: skip

    def check(self) -> None:
        """DeviceError where the device builds none, or an engine failed; its sentence says why."""
        if self.failure:
            raise DeviceError(self.failure.message, where=self.host, todo="prepare again once that is mended")
        failed = [e for e in self.engines if e.status in ("failed", "interrupted", "absent")]
        if failed:
            what = "; ".join(f"{e.candidate}: {_reason(e)}" for e in failed)
            folder = next((e.folder for e in failed if e.folder), None)
            todo = f"see {folder}/log on the device, then prepare again" if folder else "see the reason"
            raise DeviceError(f"not every engine could be built: {what}", where=self.host, todo=todo)


def prepare(
    artifact: Artifact, connection: Connection, *, root: str | None = None, candidates: tuple[str, ...] = (),
    wait: bool = True, python: str = "python3", progress: Progress = SILENT, poll_s: float = POLL_S,
) -> Prepared:  # fmt: skip
    """Have the device build the TensorRT engines of `artifact` (of `candidates`, else all), pushed first where needed.

    What is built already, for this very device and software, is not built again. With `wait` False it returns once
    the device has begun. A connection that breaks meanwhile is taken up again for two minutes; the build goes on
    in any case. Raises UsageError for a candidate that is no TensorRT one, DeviceError where the runner cannot be
    asked; what cannot be built is part of the answer, see `Prepared.check`.
    """
    names = _candidates(artifact.manifest, candidates)
    with locked(connection, root or artifact.manifest.root, artifact.manifest.name) as place:
        started = _start(place, artifact, names, python, progress)
    # the lock is free again: whoever deploys meanwhile is not held up by a build of an hour
    return _waited(started, connection, artifact, place, python, progress, poll_s) if wait else started


def prepare_at(
    place: Place, artifact: Artifact, *, python: str = "python3", progress: Progress = SILENT, poll_s: float = POLL_S
) -> Prepared | None:
    """As `prepare`, at a place that the caller has locked; None where the artifact has no engine to build."""
    names = recipes(artifact.manifest)
    if not names:
        return None
    started = _start(place, artifact, names, python, progress)
    # a connection that breaks takes the lock along, so it is not opened anew here
    return _waited(started, place.connection, artifact, place, python, progress, poll_s, lost_s=0)


def _candidates(manifest: Manifest, asked: tuple[str, ...]) -> tuple[str, ...]:
    names = recipes(manifest)
    for name in asked:
        if manifest.candidate(name).name not in names:
            raise UsageError(f"{name} is no TensorRT candidate", where=manifest.name, todo=_choose_from(names))
    if not names:
        raise UsageError(
            "the artifact has no TensorRT candidate, so there is nothing to prepare", where=manifest.name,
            todo="build it for a profile whose backends hold tensorrt",
        )  # fmt: skip
    return asked or names


def _choose_from(names: tuple[str, ...]) -> str:
    return "choose one of: " + ", ".join(names) if names else "build for a profile whose backends hold tensorrt"


def recipes(manifest: Manifest) -> tuple[str, ...]:
    """The candidates that an engine is to be built for."""
    with_recipe = {recipe.candidate for recipe in manifest.engine_recipes}
    return tuple(c.name for c in manifest.candidates if c.runtime == "tensorrt" and c.name in with_recipe)


def _start(
    place: Place, artifact: Artifact, names: tuple[str, ...], python: str, progress: Progress
) -> Prepared:  # fmt: skip
    if artifact.digest not in place.state().releases:
        push_to(place, artifact, progress=progress)
    release = place.release(artifact.digest)
    answer = ask(place.connection, python, f"{release}/{RUNNER}", "prepare", release, *names)
    return Prepared(
        artifact.manifest.name, artifact.digest, place.connection.label, answer.engines, answer.facts or {},
        answer.failure,
    )  # fmt: skip


def ask(connection: Connection, python: str, runner: str, *argv: str) -> _Answer:
    """What the runner on the device says to a command about engines. DeviceError where it cannot be asked."""
    done = connection.run([python, runner, *argv], timeout_s=180, check=False)
    if done.status == 127:
        raise DeviceError(
            f"there is no '{python}'", where=connection.label,
            todo="install Python 3.6 or newer, or name it with --python",
        )  # fmt: skip
    if done.status == _USAGE_STATUS:
        raise DeviceError(
            f"the artifact's runner is older than '{argv[0]}'", where=connection.label, todo="build the artifact again"
        )
    try:
        data = json.loads(done.stdout)
    except (ValueError, RecursionError):
        raise DeviceError(
            f"the runner gave no answer: {done.complaint}", where=connection.label,
            todo=f"run '{python} onboard.pyz environment' there by hand",
        ) from None  # fmt: skip
    return validate(_Answer, data, source=f"{connection.label}: the runner's answer", error=DeviceError)


def _waited(
    started: Prepared, connection: Connection, artifact: Artifact, place: Place, python: str, progress: Progress,
    poll_s: float, lost_s: float = LOST_S,
) -> Prepared:  # fmt: skip
    """Ask again and again until nothing is pending, showing how far it is."""
    now, said, pause_s = started, _Said(), poll_s / 10
    runner = f"{place.release(artifact.digest)}/{RUNNER}"
    try:
        with progress.bar(f"engines on {started.host}", 100 * len(started.engines)) as advance:
            said.show(now, advance)
            while now.pending:
                time.sleep(pause_s)
                pause_s = min(poll_s, 1.5 * pause_s)  # a small engine is there in a moment
                answer = _ask_again(connection, python, runner, f"{place.root}/engines", now, lost_s)
                now = Prepared(now.name, now.digest, now.host, _merged(now.engines, answer.engines), now.facts)
                said.show(now, advance)
    except KeyboardInterrupt:
        log.warning("the device goes on building; to ask how far it is: edgeopt prepare ARTIFACT HOST")
        raise
    return now


def _ask_again(
    connection: Connection, python: str, runner: str, root: str, now: Prepared, lost_s: float
) -> _Answer:  # fmt: skip
    """The state of the engines; a connection that broke is opened anew, for as long as `lost_s`."""
    passports = [engine.passport for engine in now.engines if engine.passport and engine.pending]
    deadline = time.monotonic() + lost_s
    while True:
        try:
            return ask(connection, python, runner, "engines", root, *passports)
        except (HostError, TransferError) as lost:
            if time.monotonic() >= deadline:
                lost.todo = "the device goes on building; to ask how far it is: edgeopt prepare ARTIFACT HOST"
                raise
            log.info("%s; the device goes on building, trying to reach it again", lost.what)
            connection.close()
            time.sleep(POLL_S)


def _merged(before: tuple[Engine, ...], now: tuple[Engine, ...]) -> tuple[Engine, ...]:
    found = {engine.passport: engine for engine in now}
    return tuple(
        found[e.passport].model_copy(update={"candidate": e.candidate}) if e.passport in found else e for e in before
    )


class _Said:
    """What has been shown of the engines: a bar on a terminal, elsewhere a line for each tenth."""

    def __init__(self):
        self._shares: dict[str | None, float] = {}

    def show(self, now: Prepared, advance: Advance) -> None:
        for engine in now.engines:
            before = self._shares.get(engine.candidate)
            self._shares[engine.candidate] = engine.share
            advance(100 * (engine.share - (before or 0.0)), in_words(engine))
            if engine.pending and (before is None or int(10 * before) != int(10 * engine.share)):
                log.info("%s", in_words(engine))


def in_words(engine: Engine) -> str:
    """One line for people: 'tensorrt-fp16: building, 43 % (trying kernels, layer 9 of 20), about 2 min left'."""
    if engine.status == "building":
        left = "" if engine.left_s is None else f", about {_time(engine.left_s)} left"
        return f"{engine.candidate}: building, {100 * engine.share:.0f} % ({engine.stage}){left}"
    if engine.status == "ready":
        return (
            f"{engine.candidate}: ready, built in {_time(engine.seconds or 0)}, {(engine.size_bytes or 0) / 1e6:.1f} MB"
        )
    if engine.status == "queued":
        return f"{engine.candidate}: waits for its turn"
    return f"{engine.candidate}: {engine.status}: {_reason(engine)}"


def _reason(engine: Engine) -> str:
    if engine.failure:
        return engine.failure.message
    if engine.status == "interrupted":
        return "its build was ended from outside, by a restart or for want of memory"
    return "it is not there any more"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
