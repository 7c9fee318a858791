"""Status: what a device holds, how much room it has, what was done last, and what a cut left half-finished."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from edgeopt import digest as hashes
from edgeopt.errors import DeviceError, EdgeoptError, LockedError
from edgeopt.flows import journal, policy, status_scripts
from edgeopt.flows.journal import Entry
from edgeopt.flows.place import DEFAULT_ROOT
from edgeopt.flows.place_scripts import LOCKED, NOTHING
from edgeopt.ports.blobs import free_bytes, free_inodes
from edgeopt.ports.connection import Connection, Result, script, transfer_error

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Release:
    """A release on the device. `when` is Unix time there; `damaged`: its manifest is not the one of its digest.

    `version` is that of its signature, which is not checked here; `size_bytes` counts its files, which other releases
    may share.
    """

    digest: str
    when: int
    signed: bool
    current: bool
    previous: bool
    profile: str | None = None
    version: int | None = None
    size_bytes: int | None = None
    damaged: bool = False


@dataclass(frozen=True)
class Named:
    """What a device holds of an artifact's name, newest release first. `locked_by`: who is at work there now.

    `unproven`: the digest of a switch whose after_activate and health never ended; whoever works there next undoes it.
    """

    name: str
    releases: tuple[Release, ...]
    locked_by: str | None = None
    unproven: str | None = None


@dataclass(frozen=True)
class EngineOnDevice:
    """A TensorRT engine that lies there, by its passport."""

    passport: str
    status: str
    size_bytes: int
    candidate: str | None


@dataclass(frozen=True)
class LeftOver:
    """What a cut left: 'part' of an upload, 'staging' of a release, 'blob' that no release needs."""

    kind: str
    path: str
    size_bytes: int


@dataclass(frozen=True)
class Status:
    """A device. Bytes and inodes as its file system counts them."""

    host: str
    root: str
    free_bytes: int
    used_bytes: int
    free_inodes: int | None
    names: tuple[Named, ...] = ()
    engines: tuple[EngineOnDevice, ...] = ()
    leftovers: tuple[LeftOver, ...] = ()
    journal: tuple[Entry, ...] = ()
    policy: str | None = None  # what the device demands of artifacts, in words

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Collected:
    """What garbage collection removed."""

    host: str
    root: str
    removed: tuple[LeftOver, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(left.size_bytes for left in self.removed)

    def as_dict(self) -> dict:
        return {**asdict(self), "freed_bytes": self.freed_bytes}


def status(connection: Connection, name: str | None = None, *, root: str | None = None) -> Status:
    """What lies below `root` (None: ~/.edgeopt), of `name` or of all. Two round trips; nothing is changed or locked.

    DeviceError where nothing lies there.
    """
    root = root or DEFAULT_ROOT
    done = connection.run(script(status_scripts.LOOK, root, name or ""), timeout_s=120, check=False)
    where = f"{connection.label}:{root}"
    if done.status == NOTHING:
        raise _nothing(where)
    if done.status != 0:
        raise transfer_error(done, "cannot look at the releases", where=where)
    found = parse(done.stdout, host=connection.label, where=where)
    if name is not None and not found.names:
        raise _nothing(f"{where}/{name}")
    demanded = policy.read(connection)
    return replace(found, policy=str(demanded)) if demanded else found


def collect(connection: Connection, *, root: str | None = None) -> Collected:
    """Remove what cuts have left, and blobs that no release needs, at once and not after an hour as a push does.

    LockedError where anybody is at work on the device, whatever the name: what looks like garbage may be theirs.
    """
    root = root or DEFAULT_ROOT
    who = f"{journal.ourselves()}, collecting garbage"
    line = journal.line("", "gc", None, "done")
    done = connection.run(script(status_scripts.COLLECT, root, who, line), timeout_s=600, check=False)
    if done.status == 0:
        removed = tuple(_left_over(line) for line in done.text.splitlines())
        return Collected(connection.label, root, removed)
    raise _not_collected(done, f"{connection.label}:{root}")


def _not_collected(done: Result, where: str) -> EdgeoptError:
    if done.status == LOCKED:
        return LockedError(
            "somebody is at work on the device", where=where, todo="edgeopt status HOST says who; wait until it ends"
        )
    return _nothing(where) if done.status == NOTHING else transfer_error(done, "cannot collect garbage", where=where)


def _nothing(where: str) -> DeviceError:
    return DeviceError(
        "no releases are there", where=where, todo="check name and --root, or push first: edgeopt push ARTIFACT HOST"
    )


def _left_over(line: str) -> LeftOver:
    kind, kilobytes, path = line.split(" ", 2)
    return LeftOver(kind, path.removeprefix("./"), 1024 * int(kilobytes))


@dataclass
class _Seen:
    """What the lines have told so far of a name."""

    links: dict[str, str] = field(default_factory=dict)
    releases: dict[str, tuple[int, str]] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    locked_by: str | None = None
    unproven: str | None = None


def parse(said: bytes, *, host: str, where: str) -> Status:
    """The Status that the output of status_scripts.LOOK tells of. DeviceError where it tells of something else."""
    names: dict[str, _Seen] = {}
    facts: dict[str, str] = {}
    engines, leftovers, entries = [], [], []
    try:
        for kind, rest, data in _records(said):
            if kind in ("root", "used", "inodes", "df"):
                facts[kind] = rest
            elif kind == "name":
                names[rest] = _Seen()
            elif kind == "engine":
                passport, state, kilobytes, candidate = rest.split(" ", 3)
                engines.append(EngineOnDevice(passport, state, 1024 * int(kilobytes), candidate.strip("-") or None))
            elif kind == "part":
                size, _, path = rest.split(" ", 2)
                leftovers.append(LeftOver("part", path, int(size)))
            elif kind == "loose":
                size, path = rest.split(" ", 1)
                leftovers.append(LeftOver("blob", path, int(size)))
            elif kind == "journal":
                entries += journal.parse(data.decode("utf-8", "replace"))
            else:
                leftovers += _of_a_name(kind, rest, data, names)
        return Status(
            host=host, root=facts["root"], free_bytes=free_bytes(facts["df"], where),
            used_bytes=1024 * int(facts["used"]),
            free_inodes=free_inodes(facts["inodes"]),
            names=tuple(_named(name, seen) for name, seen in names.items()), engines=tuple(engines),
            leftovers=tuple(leftovers), journal=tuple(entries),
        )  # fmt: skip
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as why:
        raise DeviceError(
            f"the device's answer is not what was asked for: {why}", where=where, todo="repeat with --debug"
        ) from why


def _records(said: bytes) -> Iterator[tuple[str, str, bytes]]:
    """(kind, rest of the line, the bytes that follow it)."""
    at = 0
    while at < len(said):
        end = said.find(b"\n", at)
        end = len(said) if end < 0 else end
        kind, _, rest = said[at:end].decode("utf-8", "replace").partition(" ")
        at = end + 1
        data = b""
        if kind in ("manifest", "journal"):
            size = int(rest.split()[1 if kind == "manifest" else 0])
            data, at = said[at : at + size], at + size
        yield kind, rest, data


def _of_a_name(kind: str, rest: str, data: bytes, names: dict[str, _Seen]) -> list[LeftOver]:
    """Take a record that belongs to a name; what it tells of leftovers is returned."""
    name, _, rest = rest.partition(" ")
    seen = names[name]
    if kind == "link":
        link, _, target = rest.partition(" ")
        seen.links[link] = target.removeprefix("releases/")
    elif kind == "pending":
        seen.unproven = rest
    elif kind == "lock":
        state, _, who = rest.partition(" ")
        seen.locked_by = who or "somebody" if state == "held" else None
    elif kind == "release":
        when, signed, folder = rest.split(" ", 2)
        if not _DIGEST.fullmatch(folder):
            return [LeftOver("staging", f"{name}/releases/{folder}", 0)] if folder.startswith(".staging-") else []
        seen.releases[folder] = int(when), signed
    elif kind == "manifest":
        seen.manifests[rest.split(" ", 1)[1]] = data
    else:
        raise ValueError(f"a line that begins with '{kind[:40]}'")
    return []


def _named(name: str, seen: _Seen) -> Named:
    releases = [_release(digest, *seen.releases[digest], seen) for digest in seen.releases]
    return Named(name, tuple(releases), seen.locked_by, seen.unproven)


def _release(digest: str, when: int, signed: str, seen: _Seen) -> Release:
    data = seen.manifests.get(digest, b"")
    manifest: dict = {}
    if hashes.of_bytes(data) == digest:
        manifest = json.loads(data)
    return Release(
        digest, when, signed != "no", digest == seen.links.get("current"), digest == seen.links.get("previous"),
        profile=manifest.get("profile"), version=int(signed) if signed.isdigit() else None,
        size_bytes=sum(file["size"] for file in manifest["files"].values()) if manifest else None,
        damaged=not manifest,
    )  # fmt: skip
