"""ROOT/NAME on a device: the lock, which releases lie there, and what `current` and `previous` point to.

    ROOT/.journal                     who did what, see journal.py
    ROOT/NAME/lock                    who holds the lock, and a token that says whether it still is us
    ROOT/NAME/releases/DIGEST/        files as in the artifact, hard links to ROOT/blobs, plus selection.json
    ROOT/NAME/current, previous       symlinks to releases/DIGEST, switched by rename
    ROOT/NAME/pending                 while a switch is not proven: what the links were

The scripts are POSIX sh, see place_scripts.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeopt.errors import DeviceError, EdgeoptError, HostError, LockedError, TransferError, UsageError
from edgeopt.flows import journal, place_scripts
from edgeopt.flows.place_scripts import AFTER_ACTIVATE_S
from edgeopt.ports.connection import CommandEnded, Connection, Result, script, transfer_error
from edgeopt.progress import log

DEFAULT_ROOT = "~/.edgeopt"
BEATS, PATIENCE_S = 12, 120  # how often we say that we live while the device waits for it
_WAIT_PAUSE_S = 1.0


@dataclass(frozen=True)
class State:
    """What a device holds of a name: digests, the releases newest first."""

    current: str | None
    previous: str | None
    releases: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """ROOT/NAME on a device, `root` absolute, locked by us while `locked(...)` lasts; `token` says that it is us."""

    connection: Connection
    root: str
    name: str
    token: str = ""

    @property
    def path(self) -> str:
        return f"{self.root}/{self.name}"

    def release(self, digest: str) -> str:
        """Where the release `digest` lies on the device."""
        return f"{self.path}/releases/{digest}"

    @property
    def where(self) -> str:
        return f"{self.connection.label}:{self.path}"

    def state(self) -> State:
        """What lies there. One round trip."""
        return parse_state(self.connection.run(script(place_scripts.STATE, self.path)).text)

    def stage(self, digest: str, files: dict[str, str], selection: bytes) -> bool:
        """Make the release `digest` of `files` (path -> blob); False where a blob has gone in the meantime."""
        lines = "".join(f"{sha256} {path}\n" for path, sha256 in sorted(files.items()))
        argv = script(
            place_scripts.STAGE, self.root, self.name, digest, self.token, self._line("push", digest, "staged")
        )
        done = self.connection.run(argv, stdin=lines.encode() + b".\n" + selection, timeout_s=300, check=False)
        if done.status == place_scripts.NO_BLOB:
            return False
        self._check(done, "cannot stage the release")
        return True

    def prune(self, digests: Sequence[str]) -> None:
        """Remove releases, and the blobs that no release links to any more."""
        what = ", ".join(digest[:12] for digest in digests)
        line = self._line("prune", None, f"removed {what}")
        argv = script(place_scripts.PRUNE, self.root, self.name, self.token, line, *digests)
        self._check(self.connection.run(argv, timeout_s=300, check=False), "cannot remove old releases")

    def point(self, current: str | None, previous: str | None, *, step: str = "switch", result: str = "done") -> None:
        """Switch the links, `previous` first; each goes from the old target to the new one by a rename."""
        line = self._line(step, current, result)
        self._point(script(place_scripts.POINT, self.root, self.name, self.token, line, current or "", previous or ""))

    def try_out(
        self, current: str, previous: str | None, state: State, restart: Sequence[str], *, step: str = "switch"
    ) -> None:
        """As `point`, until `settle` is called: where we vanish before, the device goes back to `state`.

        `restart` is the argv that starts the release of `state` again, run in its folder.
        """
        line = self._line(step, current, "switched, to be proven")
        before = (state.current or "-", state.previous or "-", shlex.join(restart))
        self._point(
            script(place_scripts.POINT, self.root, self.name, self.token, line, current, previous or "", "try", *before)
        )

    def settle(self, digest: str, result: str, *, step: str = "switch") -> None:
        """What was tried out stands now; `result` goes into the journal."""
        argv = script(place_scripts.SETTLE, self.root, self.name, self.token, self._line(step, digest, result))
        self._check(self.connection.run(argv, timeout_s=120, check=False), "cannot settle the switch")

    def note(self, step: str, digest: str | None, result: str) -> None:
        """A line for the journal, where the device can be reached and is still ours."""
        with contextlib.suppress(EdgeoptError):
            line = self._line(step, digest, result)
            # what is pending stays so: SETTLE with another journal line would call it proven
            self.connection.run(script(place_scripts.NOTE_ONLY, self.root, self.name, self.token, line), timeout_s=60)

    def find(self, release: str | None, state: State) -> str:
        """The digest that starts with `release`; without one, the only release that is there."""
        found = [digest for digest in state.releases if digest.startswith(release or "")]
        if len(found) == 1:
            return found[0]
        if not found:
            what = f"no release {release[:12]} is there" if release else "no release is there"
            raise DeviceError(what, where=self.where, todo="push it first: edgeopt push ARTIFACT HOST")
        shown = ", ".join(digest[:12] for digest in found)
        raise UsageError(f"several releases are meant: {shown}", where=self.where, todo="give more of the digest")

    def _line(self, step: str, digest: str | None, result: str) -> str:
        return journal.line(self.name, step, digest, result)

    def _point(self, argv: list[str]) -> None:
        self._check(self.connection.run(argv, timeout_s=120, check=False), "cannot switch the release")

    def _check(self, done: Result, what: str) -> None:
        if done.status == place_scripts.LOST:
            raise LockedError(
                f"the lock is not ours any more, since we were silent for too long: {done.complaint}",
                where=self.where, todo="see what they do there, then repeat",
            )  # fmt: skip
        if done.status != 0:
            raise transfer_error(done, what, where=self.where)


def parse_state(text: str) -> State:
    """The State that the lines of place_scripts.STATE tell of; a line that names no digest is left out."""
    links: dict[str, str] = {}
    releases = []
    for line in text.splitlines():
        kind, _, target = line.partition(" ")
        digest = target.removeprefix("releases/")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            continue
        if kind == "release":
            releases.append(digest)
        else:
            links[kind] = digest
    return State(links.get("current"), links.get("previous"), tuple(releases))


@contextlib.contextmanager
def locked(
    connection: Connection, root: str | None, name: str, *, make: bool = True, step: str = "", wait_s: float = 0
) -> Iterator[Place]:
    """The place of `name` below `root` (None: ~/.edgeopt), ours alone for the time of the block.

    It is made where it is missing; with `make` False that is a DeviceError. `step` names in the journal what begins.

    The lock is held by a process on the device that ends with the connection, or when nothing is heard of us for two
    minutes, so it cannot be left behind. A switch that was never proven is undone first.
    Raises LockedError where somebody else holds it and `wait_s` seconds later still does, DeviceError where the folder
    cannot be made.
    """
    root = root or DEFAULT_ROOT
    token = secrets.token_hex(8)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    who = f"{journal.ourselves()}, process {os.getpid()}, since {since}"
    begun = journal.line(name, step, None, "begun") if step else ""
    # an operator who waits for less is gone sooner
    patience_s = max(2, min(PATIENCE_S, round(8 * connection.silence_s)))
    argv = script(place_scripts.LOCK, root, name, who, "make" if make else "", token, begun, str(patience_s))
    with contextlib.ExitStack() as stack:
        absolute = _held(stack, connection, argv, patience_s, f"{connection.label}:{root}/{name}", wait_s)
        place = Place(connection, absolute, name, token)
        try:
            yield place
        except (HostError, TransferError):
            raise
        except EdgeoptError as why:
            if step:
                place.note(step, None, f"failed: {why.what}")
            raise


def _held(
    stack: contextlib.ExitStack, connection: Connection, argv: list[str], patience_s: int, where: str, wait_s: float
) -> str:
    """The absolute root, the lock held until `stack` is left."""
    deadline = time.monotonic() + wait_s
    said = False
    while True:
        try:
            # before it answers it may have to undo a switch and start the old release again
            return stack.enter_context(
                connection.hold(argv, timeout_s=AFTER_ACTIVATE_S + 60, beat_s=patience_s / BEATS)
            )
        except CommandEnded as ended:
            why = _not_locked(ended, where)
            if not isinstance(why, LockedError) or time.monotonic() >= deadline:
                raise why from None
            if not said:
                log.info("%s; waiting", why.what)
                said = True
            time.sleep(_WAIT_PAUSE_S)


def _not_locked(ended: CommandEnded, where: str) -> EdgeoptError:
    done = ended.result
    if done.status == place_scripts.LOCKED:
        return LockedError(
            f"somebody else is at work there: {done.complaint}", where=where,
            todo="wait until it ends; the lock goes with its connection",
        )  # fmt: skip
    if done.status == place_scripts.NOTHING:
        return DeviceError(
            "nothing of that name is there", where=where,
            todo="check name and --root, or push it first: edgeopt push ARTIFACT HOST",
        )  # fmt: skip
    if done.status == place_scripts.LACKING:
        return DeviceError(
            f"the device lacks {', '.join(done.complaint.split())}", where=where,
            todo="install coreutils and findutils, or busybox, there",
        )  # fmt: skip
    return transfer_error(done, "cannot use the folder for releases", where=where)
