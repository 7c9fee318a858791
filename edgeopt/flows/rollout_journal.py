"""What a rollout has done, so that it goes on after its machine died: a line of JSON an event, flushed to the disk.

    rollouts/NAME.lock                held while a rollout of artifacts called NAME goes on
    rollouts/ID/journal.jsonl         the plan first, then what happened
    rollouts/ID/devices/DEVICE.json   a report a device
    rollouts/ID/work/, engines/       scratch, and engines that one device built for others

`rollouts` lies beside the artifact. A last line that is cut off was never acted upon: it is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeopt import digest
from edgeopt.errors import LockedError, RolloutError, UsageError, disk_error
from edgeopt.flows.rollout_plan import Plan
from edgeopt.runtime.artifact import sync
from edgeopt.spec.values import validate

FOLDER = "rollouts"
_JOURNAL = "journal.jsonl"


def folder_beside(artifact: Path) -> Path:
    """Where rollouts of the artifact in the folder `artifact` are kept."""
    return artifact.resolve().parent / FOLDER


def new_id(folder: Path, name: str) -> str:
    """An ID that no rollout in `folder` has: the artifact's name and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    found = f"{name}-{stamp}"
    return next(i for n in range(1000) if not (folder / (i := found + (f"-{n}" if n else ""))).exists())


def find(folder: Path, name: str, asked: str) -> Path:
    """The folder of the rollout `asked`, or with '' of the newest of artifacts called `name`. UsageError without."""
    known = sorted(
        (p.parent for p in folder.glob(f"*/{_JOURNAL}") if re.fullmatch(rf"{re.escape(name)}-[\d-]+", p.parent.name)),
        key=lambda p: p.stat().st_mtime_ns,
    )
    fits = [path for path in known if path.name == asked] if asked else known[-1:]
    if not fits:
        names = ", ".join(path.name for path in known) or "none"
        raise UsageError(
            f"there is no rollout {asked or 'of ' + name}", where=str(folder), todo=f"rollouts of {name} there: {names}"
        )
    return fits[0]


@contextlib.contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """A block in which no other rollout of artifacts called `name` goes on. LockedError where one does."""
    path = folder / f"{name}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = open(path, "a+")  # noqa: SIM115
    except OSError as why:
        raise disk_error(why, path, error=RolloutError) from None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.seek(0)
            raise LockedError(
                f"another rollout of {name} is going on: process {held.read().strip() or 'unknown'}", where=str(path),
                todo="wait until it ends; the lock goes with its process",
            ) from None  # fmt: skip
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        yield


class Journal:
    """The file that events are appended to, from any thread."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._file = open(path, "ab")  # noqa: SIM115

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; it is on the disk when this returns."""
        line = json.dumps(digest.finite({"event": event, "at": _now(), **fields})).encode() + b"\n"
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as why:
                raise disk_error(why, self._path, error=RolloutError) from None

    def close(self) -> None:
        self._file.close()


def begin(folder: Path, plan: Plan) -> Journal:
    """The folder and the journal of a new rollout."""
    try:
        folder.mkdir(parents=True)
        for name in ("devices", "work", "engines"):
            (folder / name).mkdir()
        journal = Journal(folder / _JOURNAL)
        journal.write("plan", plan=plan.model_dump(mode="json"))
        sync(folder)
        sync(folder.parent)
    except OSError as why:
        raise disk_error(why, folder, error=RolloutError) from None
    return journal


def take_up(folder: Path) -> tuple[Plan, list[dict[str, Any]], Journal]:
    """(plan, events, journal) of the rollout in `folder`; what was cut off at the end is removed from the file."""
    path = folder / _JOURNAL
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    events = [_event(line, path, number) for number, line in enumerate(whole.splitlines(), 1)]
    if not events or events[0]["event"] != "plan":
        raise _damaged(path, 1)
    plan = validate(Plan, events[0].get("plan"), source=str(path), error=RolloutError)
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return plan, events[1:], Journal(path)


def _event(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        raise _damaged(path, number) from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise _damaged(path, number)
    return event


def _damaged(path: Path, line: int) -> RolloutError:
    return RolloutError(
        "the record of the rollout is damaged", where=f"{path}:{line}",
        todo="begin a new rollout: devices that run the artifact already are left as they are",
    )  # fmt: skip


@dataclass
class Known:
    """What the journal says of a device. `before` is what it ran: {"current", "previous"}, digests or None."""

    state: str = "waiting"
    before: dict[str, Any] | None = None
    last: dict[str, Any] | None = None  # the newest event that ended something


def replay(plan: Plan, events: list[dict[str, Any]]) -> dict[str, Known]:
    """The devices as the events left them."""
    known = {device.name: Known() for device in plan.devices}
    for event in events:
        device = known.get(event.get("device", ""))
        if event["event"] != "device" or device is None:
            continue
        device.state = str(event.get("state"))
        device.before = event.get("before") or device.before
        if device.state != "begun":
            device.last = event
    return known


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def file_name(device: str) -> str:
    """The name of a device as a file's name; two devices never share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", device)
    return plain if plain == device else f"{plain}-{digest.of_bytes(device.encode())[:8]}"
