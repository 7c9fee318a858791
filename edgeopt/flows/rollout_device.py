"""One device of a rollout: deployed as one would by hand, asked whether it still runs, or taken back.

Whatever happens to it is an Outcome and never an exception, so that no device's error is another's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeopt import digest as digests
from edgeopt.errors import DeviceError, EdgeoptError, HostError, HostKeyError, LockedError, TransferError
from edgeopt.flows.activate import ask_health, switch
from edgeopt.flows.deploy import Deployed, deploy
from edgeopt.flows.place import Place, locked
from edgeopt.flows.push import KEEP
from edgeopt.flows.rollout_engines import Engines
from edgeopt.flows.rollout_journal import file_name
from edgeopt.flows.rollout_plan import Planned
from edgeopt.flows.validate import How, latest_report
from edgeopt.ports.connection import Connection
from edgeopt.progress import Progress
from edgeopt.runtime.artifact import Artifact, replace_file
from edgeopt.spec.manifest import REPORTS_DIR, SELECTION_NAME

Tell = Callable[[str, str], None]
"""Called with a state ('pushing') and a detail for people ('12.1 of 40.0 MB, 3.2 MB/s', or '')."""

_TOLD_S = 0.25
# how the bars of the steps begin -> the state that a device is in meanwhile
_STATES = (("push ", "pushing"), ("engines ", "preparing"), ("measuring ", "validating"), ("fetching ", "validating"))


class Stopped(EdgeoptError):
    """The rollout was interrupted, and this device's step with it."""


class DeviceProgress(Progress):
    """The steps' bars as states of a device. Ends the step with Stopped once `stopped()` holds."""

    def __init__(self, tell: Tell, stopped: Callable[[], bool]):
        super().__init__(quiet=True)
        self._tell = tell
        self._stopped = stopped

    def check(self) -> None:
        if self._stopped():
            raise Stopped("the rollout was interrupted", todo="go on with 'edgeopt rollout ARTIFACT --resume'")

    @contextlib.contextmanager
    def bar(self, label: str, total: float | None, *, unit: str = "") -> Iterator[Callable[..., None]]:
        self.check()
        state = next((state for start, state in _STATES if label.startswith(start)), None)
        begun, told, done = time.monotonic(), 0.0, 0.0
        if state:
            self._tell(state, "")

        def advance(amount: float, label: str | None = None) -> None:
            nonlocal told, done
            self.check()
            done += amount
            now = time.monotonic()
            if state and now - told >= _TOLD_S:
                told = now
                self._tell(state, _in_words(done, total, unit, now - begun, label))

        yield advance


def _in_words(done: float, total: float | None, unit: str, seconds: float, label: str | None) -> str:
    if unit == "bytes" and total:
        return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {done / 1e6 / max(seconds, 1e-3):.1f} MB/s"
    return label or ""


@dataclass(frozen=True)
class Task:
    """What is the same for every device of a rollout. `reach` gives the Connection to a host; nothing is reached yet.

    `begun(device, before)` is called before a device is changed, with what it runs: {"current", "previous"}.
    """

    id: str
    folder: Path
    artifacts: dict[str, Artifact]
    reach: Callable[[str], contextlib.AbstractContextManager[Connection]]
    begun: Callable[[str, dict[str, Any]], None]
    stopped: Callable[[], bool]
    how: How = field(default_factory=How)
    keep: int = KEEP
    engines: Engines | None = None  # None: every device builds its own


@dataclass(frozen=True)
class Outcome:
    """How a device ended up.

    `state`: 'active', 'failed', 'offline', 'busy' (somebody else is at work there), 'stopped', 'rolled back',
    'not rolled back', 'left' (it runs something else by now). `kept`: it ran the artifact already. `before` as in
    Task. `again`: another try may help.
    """

    state: str
    what: str = ""
    error: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    kept: bool = False
    again: bool = False
    moved_bytes: int = 0
    chosen: str | None = None
    ms: float | None = None
    simulated: str | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "again"}


def deploy_one(task: Task, device: Planned, tell: Tell, interrupted: dict[str, Any] | None = None) -> Outcome:
    """Deploy to `device`. What runs the artifact already is not deployed again.

    `interrupted`: what the device ran before a deployment of this rollout whose end is not known; where the artifact
    is current by now, its health command is asked, and where that fails the device is taken back.
    """
    artifact = task.artifacts[device.digest]
    view = task.folder / "work" / file_name(device.name)
    done: Deployed | None = None

    def work(connection: Connection) -> Outcome:
        nonlocal done
        mirrored = mirror(artifact, view)
        progress = DeviceProgress(tell, task.stopped)
        tell("connecting", "")
        with locked(connection, device.release_root, artifact.manifest.name) as place:
            state = place.state()
            if state.current == artifact.digest:
                return _kept(place, artifact.digest, interrupted)
            before = {"current": state.current, "previous": state.previous}
            task.begun(device.name, before)
            if task.engines is not None:
                task.engines.serve(place, mirrored, device.python, task.keep, progress)
        how = replace(task.how, python=device.python)
        done = deploy(mirrored, connection, how, root=device.release_root, keep=task.keep, progress=progress)
        if done.activated.previous != before["current"]:  # somebody else switched in between
            before = {"current": done.activated.previous, "previous": None}
        report = done.validated.report
        chosen = next((c for c in report.candidates if c.name == report.chosen), None)
        return Outcome(
            "active", before=before, moved_bytes=done.pushed.moved_bytes, chosen=report.chosen,
            ms=chosen.ms if chosen else None, simulated=report.simulated,
        )  # fmt: skip

    outcome = _outcome(task, device, work)
    _keep_report(task, device, outcome, done, view)
    return outcome


def check_one(task: Task, device: Planned, tell: Tell, before: dict[str, Any] | None) -> Outcome:
    """Whether the device still runs the artifact and is healthy: 'active', else 'failed' and the reason.

    One that is not healthy is taken back to what it ran `before`; None leaves it.
    """
    name = task.artifacts[device.digest].manifest.name

    def work(connection: Connection) -> Outcome:
        tell("checking", "")
        with locked(connection, device.release_root, name, make=False) as place:
            if place.state().current != device.digest:
                raise DeviceError(
                    "after the soak it does not run the artifact any more", where=place.where,
                    todo="see who switched it",
                )  # fmt: skip
            _ask_or_return(place, device.digest, before)
        return Outcome("active")

    return _outcome(task, device, work)


def take_back(task: Task, device: Planned, before: dict[str, Any], tell: Tell) -> Outcome:
    """Have the device run what it ran `before`: 'rolled back', 'left' where it runs neither by now, or why not."""
    name = task.artifacts[device.digest].manifest.name

    def work(connection: Connection) -> Outcome:
        tell("rolling back", "")
        with locked(connection, device.release_root, name, make=False) as place:
            return return_at(place, device.digest, before)

    outcome = _outcome(task, device, work)
    if outcome.error is not None:
        outcome = replace(outcome, state="not rolled back")
    return outcome


def return_at(place: Place, digest: str, before: dict[str, Any]) -> Outcome:
    """Point the links of a locked place from the release `digest` back to what they were `before`."""
    state = place.state()
    if state.current != digest:
        runs = f"it runs {state.current[:12]}" if state.current else "it runs nothing"
        return Outcome("left", f"{runs}, which is not this rollout's: left as it is", before=before)
    current = before.get("current")
    # a release that was pruned meanwhile cannot be returned to
    previous = before.get("previous") if before.get("previous") in state.releases else None
    if current is None:
        place.point(None, previous)
        return Outcome("rolled back", "it runs no release, as before", before=before)
    if current not in state.releases:
        raise DeviceError(
            f"the release that it ran before, {current[:12]}, is not there any more", where=place.where,
            todo="push that one again and activate it",
        )  # fmt: skip
    switch(place, state, current)
    place.point(current, previous)
    return Outcome("rolled back", f"it runs {current[:12]} again", before=before)


def mirror(artifact: Artifact, view: Path) -> Artifact:
    """The artifact as seen from the folder `view`, made of links, in which selection and reports are the device's own.

    Devices deployed at once would overwrite each other's in the artifact's folder.
    """
    view.mkdir(parents=True, exist_ok=True)
    for path in artifact.folder.resolve().iterdir():
        link = view / path.name
        if path.name == SELECTION_NAME:
            shutil.copyfile(path, link)
        elif path.name != REPORTS_DIR and not link.is_symlink():
            link.symlink_to(path)
    return Artifact(view, artifact.manifest)


def _kept(place: Place, digest: str, interrupted: dict[str, Any] | None) -> Outcome:
    if interrupted is None:
        return Outcome("active", "it ran this already", kept=True)
    _ask_or_return(place, digest, interrupted)
    return Outcome("active", "it was activated before the interruption", before=interrupted)


def _ask_or_return(place: Place, digest: str, before: dict[str, Any] | None) -> None:
    """As `ask_health`; a device that is not healthy is taken back to what it ran `before`, where that is known."""
    try:
        ask_health(place, digest)
    except DeviceError as why:
        back = f"; {return_at(place, digest, before).what}" if before is not None else ""
        raise DeviceError(f"{why.what}{back}", where=why.where, todo=why.todo) from None


def _outcome(task: Task, device: Planned, work: Callable[[Connection], Outcome]) -> Outcome:
    """What `work` gives with a connection to the device, or the error that it ended with."""
    started = time.monotonic()
    try:
        with task.reach(device.host) as connection:
            found = work(connection)
    except Stopped as why:
        found = Outcome("stopped", why.what)
    except EdgeoptError as why:
        state, again = _kind(why)
        found = Outcome(state, why.what, error=why.as_dict(), again=again)
    except Exception as why:  # a fault of ours on one device must not end the others
        found = Outcome("failed", f"an error in edgeopt itself: {type(why).__name__}: {why}", error={
            "error": type(why).__name__, "what": str(why), "where": device.name, "next": "report it"})  # fmt: skip
    return replace(found, seconds=time.monotonic() - started)


def _kind(why: EdgeoptError) -> tuple[str, bool]:
    """(state, whether another try may help) of an error."""
    if isinstance(why, HostKeyError):
        return "failed", False
    if isinstance(why, HostError):
        return "offline", True
    if isinstance(why, LockedError):
        return "busy", True
    return "failed", isinstance(why, TransferError)


def _keep_report(task: Task, device: Planned, outcome: Outcome, done: Deployed | None, view: Path) -> None:
    """The device's report in the rollout's folder; its scratch goes, once nothing is left to go on with."""
    try:
        said = latest_report(view).model_dump(mode="json")
    except EdgeoptError:
        said = None  # it did not come as far as being measured
    steps = done.as_dict() if done else {"report": said}
    about = {"rollout": task.id, "device": device.model_dump(mode="json"), "outcome": outcome.as_dict()}
    path = report_path(task.folder, device.name)
    replace_file(path, json.dumps(digests.finite({**about, **steps}), indent=1).encode())
    if outcome.state != "stopped" and not outcome.again:
        shutil.rmtree(view, ignore_errors=True)


def report_path(folder: Path, device: str) -> Path:
    """Where the report of a device lies in the folder of a rollout."""
    return folder / "devices" / f"{file_name(device)}.json"
