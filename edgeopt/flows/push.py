"""Push: the files of an artifact that a device lacks travel, and become a release beside the running one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeopt.errors import SpaceError, TransferError
from edgeopt.flows import torch_versions
from edgeopt.flows.place import Place, State, locked
from edgeopt.ports.blobs import BlobStore, Survey
from edgeopt.ports.connection import Connection
from edgeopt.progress import SILENT, Progress
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import FILE_NAME, SELECTION_NAME

KEEP = 3
# folders, links and selection.json of a release, and what a file system keeps for itself
_MARGIN_BYTES = 1 << 20
_MARGIN_INODES = 16


@dataclass(frozen=True)
class Pushed:
    """What a push did. `release` is the path on the device, `already_there` that nothing had to be done.

    `moved_bytes` of files travelled, as `sent_bytes` where they were compressed.
    """

    name: str
    digest: str
    host: str
    root: str
    release: str
    already_there: bool
    moved_bytes: int
    blobs_moved: int
    blobs_skipped: int
    pruned: tuple[str, ...]
    seconds: float
    sent_bytes: int = 0

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class _Moved:
    """Of a transfer: bytes of files, bytes that travelled, blobs, and the releases that were removed to make room."""

    moved_bytes: int = 0
    sent_bytes: int = 0
    blobs: int = 0
    pruned: tuple[str, ...] = ()

    def __add__(self, other: _Moved) -> _Moved:
        return _Moved(
            self.moved_bytes + other.moved_bytes, self.sent_bytes + other.sent_bytes,
            self.blobs + other.blobs, self.pruned + other.pruned,
        )  # fmt: skip


def push(
    artifact: Artifact,
    connection: Connection,
    *,
    root: str | None = None,
    keep: int = KEEP,
    progress: Progress = SILENT,
    wait_s: float = 0,
) -> Pushed:
    """Stage `artifact` as a release on the device; it is not activated.

    `root` is where releases lie there, else the manifest's, else ~/.edgeopt. The last `keep` releases stay, and
    `current` and `previous` besides them. Raises SpaceError before anything moves where the disk is too small,
    TransferError where the link breaks (repeating resumes), LockedError where another push is at work and still is
    after `wait_s` seconds, DeviceError where the device's torch is older than the files and the artifact has nothing
    else that the device runs.
    """
    root = root or artifact.manifest.root
    with locked(connection, root, artifact.manifest.name, step="push", wait_s=wait_s) as place:
        return push_to(place, artifact, keep=keep, progress=progress)


def push_to(
    place: Place, artifact: Artifact, *, keep: int = KEEP, progress: Progress = SILENT, python: str = "python3"
) -> Pushed:
    """As `push`, where the caller holds the lock of `place`; `python` is the interpreter there that has torch."""
    started = time.monotonic()
    digest = artifact.digest
    state = place.state()
    moved = _Moved()
    blobs = blobs_of(artifact)
    spare = to_prune(state, digest, keep)
    if digest not in state.releases:
        torch_versions.check(artifact, place.connection, python)
        moved = _transfer(place, artifact, blobs, spare, progress)
    if spare and not moved.pruned:
        place.prune(spare)
    return Pushed(
        name=place.name,
        digest=digest,
        host=place.connection.label,
        root=place.root,
        release=place.release(digest),
        already_there=digest in state.releases,
        moved_bytes=moved.moved_bytes,
        blobs_moved=moved.blobs,
        blobs_skipped=len(blobs) - moved.blobs,
        pruned=spare,
        seconds=time.monotonic() - started,
        sent_bytes=moved.sent_bytes,
    )


def blobs_of(artifact: Artifact) -> dict[str, Path]:
    """sha256 -> a file here that has it: the manifest's files and the manifest itself, whose sha256 is the digest."""
    blobs = {file.sha256: artifact.path(name) for name, file in sorted(artifact.manifest.files.items())}
    return blobs | {artifact.digest: artifact.folder / FILE_NAME}


def sizes_of(blobs: dict[str, Path]) -> dict[str, int]:
    """sha256 -> bytes."""
    return {sha256: path.stat().st_size for sha256, path in blobs.items()}


def to_prune(state: State, digest: str, keep: int) -> tuple[str, ...]:
    """All but the newest `keep` releases, `current` and `previous` and the one that is pushed."""
    protected = {digest, state.current, state.previous}
    others = [release for release in state.releases if release not in protected]
    return tuple(others[max(0, keep - 1) :])


def _transfer(
    place: Place, artifact: Artifact, blobs: dict[str, Path], spare: tuple[str, ...], progress: Progress
) -> _Moved:
    """What moved. Once more from the survey where a blob was pruned from under us."""
    files = {name: file.sha256 for name, file in artifact.manifest.files.items()}
    files[FILE_NAME] = artifact.digest
    hint = artifact.folder / SELECTION_NAME
    selection = hint.read_bytes() if hint.is_file() else b""
    moved = _Moved()
    for _ in range(2):
        moved += _upload_missing(place, blobs, () if moved.pruned else spare, progress)
        if place.stage(artifact.digest, files, selection):
            return moved
    raise TransferError("blobs vanish while we push", where=place.where, todo="see who else removes files there")


def _upload_missing(place: Place, blobs: dict[str, Path], spare: tuple[str, ...], progress: Progress) -> _Moved:
    """Send what the device lacks, after `spare` releases have made room where it is wanted."""
    store = BlobStore(place.connection, place.root, owner=place.name)
    sizes = sizes_of(blobs)
    survey = store.survey(sizes)
    pruned: tuple[str, ...] = ()
    if spare and shortage(survey, sizes):
        # they would go after the push in any case
        place.prune(spare)
        pruned, survey = spare, store.survey(sizes)
    if why := shortage(survey, sizes):
        raise SpaceError(
            f"the device's disk is too full: {why}", where=place.where,
            todo="edgeopt status HOST --gc, push with a smaller --keep, or choose another --root",
        )  # fmt: skip
    total = sum(sizes[sha256] for sha256 in survey.missing)
    moved = 0
    with progress.bar(f"push {place.name}", total, unit="bytes") as advance:
        for sha256, part in survey.missing.items():
            moved += store.upload(blobs[sha256], sha256, sizes[sha256], part, advance=advance)
    return _Moved(moved, store.sent_bytes, len(survey.missing), pruned)


def shortage(survey: Survey, sizes: dict[str, int]) -> str | None:
    """Why the device's disk does not hold what is missing and the release, in words; None where it does."""
    if survey.missing or survey.links is False:
        needed = sum(sizes[sha256] - (part.size if part else 0) for sha256, part in survey.missing.items())
        copies = sum(sizes.values()) if survey.links is False else 0  # a file system without hard links
        if needed + copies + _MARGIN_BYTES > survey.free_bytes:
            twice = f" and {copies / 1e6:.1f} MB for a copy, since it has no hard links" if copies else ""
            return f"{needed / 1e6:.1f} MB are needed{twice}, {survey.free_bytes / 1e6:.1f} MB are free"
        inodes = 2 * len(survey.missing) + (len(sizes) if copies else 0) + _MARGIN_INODES
        if survey.free_inodes is not None and inodes > survey.free_inodes:
            return f"{inodes} inodes are needed, {survey.free_inodes} are free"
    return None
