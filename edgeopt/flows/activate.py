"""Activate and rollback: which release of a device is `current`, proven by its health command."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from edgeopt.errors import ArtifactError, DeviceError, EdgeoptError
from edgeopt.flows import policy
from edgeopt.flows.place import Place, State, locked
from edgeopt.flows.place_scripts import AFTER_ACTIVATE_S
from edgeopt.ports.connection import Connection, script
from edgeopt.progress import log
from edgeopt.runtime.zipapp import FILE_NAME as RUNNER
from edgeopt.spec import manifest as spec
from edgeopt.spec.manifest import Manifest

HEALTH_S = 120
ENGINE_S = 180

_IN_FOLDER = 'cd "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Activated:
    """What a switch did. `previous` is the digest that rollback would return to; `changed` False: it was current."""

    name: str
    digest: str
    previous: str | None
    host: str
    current_link: str
    changed: bool

    def as_dict(self) -> dict:
        return asdict(self)


def activate(
    connection: Connection, name: str, release: str | None = None, *, root: str | None = None, wait_s: float = 0
) -> Activated:
    """Make `release` (a digest or its beginning; None: the only one there) the current release of `name`.

    The release's after_activate and health commands are run in its folder; where one fails the links go back to
    what they were, after_activate of the old release is run again, and DeviceError says so. Where we vanish in between
    the device goes back by itself. `wait_s`: how long to wait for a lock that somebody else holds.
    """
    with locked(connection, root, name, make=False, step="activate", wait_s=wait_s) as place:
        state = place.state()
        return switch(place, state, place.find(release, state), step="activate")


def rollback(
    connection: Connection, name: str, release: str | None = None, *, root: str | None = None, wait_s: float = 0
) -> Activated:
    """Make the previous release of `name` the current one, and the current one the previous. See `activate`.

    `release`, a digest or its beginning, names another one that is still there.
    """
    with locked(connection, root, name, make=False, step="rollback", wait_s=wait_s) as place:
        state = place.state()
        if release is not None:
            return switch(place, state, place.find(release, state), step="rollback")
        # both are the same where a cut came between the two links
        if state.previous is None or state.previous not in state.releases or state.previous == state.current:
            raise DeviceError(
                "there is no previous release to return to", where=place.where,
                todo="name one: edgeopt rollback NAME HOST --release DIGEST; edgeopt status HOST lists them",
            )  # fmt: skip
        return switch(place, state, state.previous, step="rollback")


def switch(place: Place, state: State, digest: str, *, step: str = "activate") -> Activated:
    """Point `current` of the locked `place` to the release `digest` and prove it, or point it back."""
    changed = state.current != digest
    previous = state.current if changed else state.previous
    if changed:
        manifest = read_manifest(place, digest)
        demanded = policy.check_release(place, digest, manifest)
        _say_what_is_not_prepared(place, digest, manifest)
        if manifest.after_activate or manifest.health:
            _try_out(place, state, digest, previous, manifest, step)
        else:
            place.point(digest, previous, step=step)
        policy.record(place, digest, demanded)
    return Activated(place.name, digest, previous, place.connection.label, f"{place.path}/current", changed)


def _try_out(
    place: Place, state: State, digest: str, previous: str | None, manifest: Manifest, step: str
) -> None:  # fmt: skip
    """Switch and prove, and go back where that fails."""
    restart = _restart_of(place, state)
    place.try_out(digest, previous, state, restart, step=step)
    try:
        _prove(place, digest, manifest)
        place.settle(digest, "proven", step=step)
    except BaseException as why:
        _switch_back(place, state, restart)
        if isinstance(why, EdgeoptError):
            place.settle(digest, f"switched back: {why.what}", step=step)
            now = f"{state.current[:12]} is current again" if state.current else "no release is current"
            raise DeviceError(
                f"release {digest[:12]} was switched back: {why.what}; {now}", where=place.where, todo=why.todo
            ) from why
        place.settle(digest, "switched back: interrupted", step=step)
        raise


def _restart_of(place: Place, state: State) -> tuple[str, ...]:
    """after_activate of the release that is current; none where its manifest cannot be read."""
    if state.current is None:
        return ()
    try:
        return read_manifest(place, state.current).after_activate
    except (DeviceError, ArtifactError) as why:
        log.warning("what starts %s again is not known: %s", state.current[:12], why.what)
        return ()


def read_manifest(place: Place, digest: str) -> Manifest:
    """The manifest of a release on the device. ArtifactError where it is not what its digest says."""
    path = f"{place.release(digest)}/{spec.FILE_NAME}"
    manifest = spec.decode(place.connection.run(["cat", path]).stdout, source=f"{place.connection.label}:{path}")
    if spec.digest(manifest) != digest:
        raise DeviceError(
            "the release's manifest is not the one it was pushed with", where=f"{place.connection.label}:{path}",
            todo="remove that release on the device and push again",
        )  # fmt: skip
    return manifest


def _say_what_is_not_prepared(place: Place, digest: str, manifest: Manifest) -> None:
    """Warn where the candidate that applications will load is an engine which this device does not have."""
    release, chosen = place.release(digest), manifest.candidates[0].name
    selection = place.connection.run(["cat", f"{release}/{spec.SELECTION_NAME}"], check=False)
    if selection.status == 0:
        chosen = _member(selection.stdout, "candidate") or chosen
    if not any(c.name == chosen and c.runtime == "tensorrt" for c in manifest.candidates):
        return
    argv = ["python3", f"{release}/{RUNNER}", "ready", release, chosen]
    done = place.connection.run(argv, timeout_s=ENGINE_S, check=False)
    failure = _member(done.stdout, "failure")
    if failure:
        log.warning("%s: %s will not load: %s", place.where, chosen, failure["message"])


def _member(data: bytes, key: str):
    """A member of the JSON object `data`; None where it is none: what is asked here is a hint."""
    try:
        return json.loads(data)[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _prove(place: Place, digest: str, manifest: Manifest) -> None:
    _run(place, digest, "after_activate", manifest.after_activate, AFTER_ACTIVATE_S)
    _run(place, digest, "health", manifest.health, HEALTH_S)


def ask_health(place: Place, digest: str) -> None:
    """Run the health command of a release; DeviceError where it fails. Nothing where the release has none."""
    _run(place, digest, "health", read_manifest(place, digest).health, HEALTH_S)


def _run(place: Place, digest: str, key: str, argv: tuple[str, ...], timeout_s: float) -> None:
    if not argv:
        return
    command = script(_IN_FOLDER, place.release(digest), *argv)
    done = place.connection.run(command, timeout_s=timeout_s, check=False)
    if done.status != 0:
        raise DeviceError(
            f"its '{key}' command ({' '.join(argv)}) failed with status {done.status}: {done.complaint}",
            where=place.where,
            todo=f"run it by hand in {place.release(digest)}",
        )


def _switch_back(place: Place, state: State, restart: tuple[str, ...]) -> None:
    place.point(state.current, state.previous, step="undo")
    if state.current is None:
        return
    try:
        # what it restarts must come up with the old release again
        _run(place, state.current, "after_activate", restart, AFTER_ACTIVATE_S)
    except EdgeoptError as why:
        log.warning("after switching back: %s", why)
