"""Push: the files of an artifact that a device lacks travel, and become a release beside the running one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeopt.errors import SpaceError, TransferError
from edgeopt.flows import policy, torch_versions
from edgeopt.flows.place import Place, State, locked
from edgeopt.ports.blobs import BlobStore, Survey
from edgeopt.ports.connection import Connection
from edgeopt.progress import SILENT, Progress
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import FILE_NAME, SELECTION_NAME

KEEP = 3
# folders, links and selection.json of a release, and what a file system keeps for itself
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Pushed:
    """What a push did. `release` is the path on the device, `already_there` that nothing had to be done."""

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

    def as_dict(self) -> dict:
        return asdict(self)


def push(
    artifact: Artifact,
    connection: Connection,
    *,
    root: str | None = None,
    keep: int = KEEP,
    progress: Progress = SILENT,
) -> Pushed:
    """Stage `artifact` as a release on the device; it is not activated.

    `root` is where releases lie there, else the manifest's, else ~/.edgeopt. The last `keep` releases stay, and
    `current` and `previous` besides them. Raises SpaceError before anything moves where the disk is too small,
    TransferError where the link breaks (repeating resumes), LockedError where another push is at work, DeviceError
    where the device's torch is older than the files and the artifact has nothing else that the device runs.
    """
    with locked(connection, root or artifact.manifest.root, artifact.manifest.name) as place:
        return push_to(place, artifact, keep=keep, progress=progress)


def push_to(
    place: Place, artifact: Artifact, *, keep: int = KEEP, progress: Progress = SILENT, python: str = "python3"
) -> Pushed:
    """As `push`, where the caller holds the lock of `place`; `python` is the interpreter there that has torch."""
    started = time.monotonic()
    digest = artifact.digest
    policy.check(place, artifact)
    state = place.state()
    moved = blobs_moved = 0
    blobs = blobs_of(artifact)
    if digest not in state.releases:
        torch_versions.check(artifact, place.connection, python)
        moved, blobs_moved = _transfer(place, artifact, blobs, progress)
    policy.carry(place, artifact)
    pruned = _prune(place, digest, state, keep)
    return Pushed(
        name=place.name,
        digest=digest,
        host=place.connection.label,
        root=place.root,
        release=place.release(digest),
        already_there=digest in state.releases,
        moved_bytes=moved,
        blobs_moved=blobs_moved,
        blobs_skipped=len(blobs) - blobs_moved,
        pruned=pruned,
        seconds=time.monotonic() - started,
    )


def blobs_of(artifact: Artifact) -> dict[str, Path]:
    """sha256 -> a file here that has it: the manifest's files and the manifest itself, whose sha256 is the digest."""
    blobs = {file.sha256: artifact.path(name) for name, file in sorted(artifact.manifest.files.items())}
    return blobs | {artifact.digest: artifact.folder / FILE_NAME}


def _transfer(place: Place, artifact: Artifact, blobs: dict[str, Path], progress: Progress) -> tuple[int, int]:
    """(bytes, blobs) that moved. Once more from the survey where a blob was pruned from under us."""
    files = {name: file.sha256 for name, file in artifact.manifest.files.items()}
    files[FILE_NAME] = artifact.digest
    hint = artifact.folder / SELECTION_NAME
    selection = hint.read_bytes() if hint.is_file() else b""
    moved = count = 0
    for _ in range(2):
        sent = _upload_missing(place, blobs, progress)
        moved, count = moved + sum(sent), count + len(sent)
        if place.stage(artifact.digest, files, selection):
            return moved, count
    raise TransferError("blobs vanish while we push", where=place.where, todo="see who else removes files there")


def _upload_missing(place: Place, blobs: dict[str, Path], progress: Progress) -> list[int]:
    """The bytes sent of each blob that the device lacked."""
    store = BlobStore(place.connection, place.root, owner=place.name)
    sizes = {sha256: path.stat().st_size for sha256, path in blobs.items()}
    survey = store.survey(sizes)
    _check_space(survey, sizes, place)
    total = sum(sizes[sha256] for sha256 in survey.missing)
    sent = []
    with progress.bar(f"push {place.name}", total, unit="bytes") as advance:
        for sha256, part in survey.missing.items():
            sent.append(store.upload(blobs[sha256], sha256, sizes[sha256], part, advance=advance))
    return sent


def _check_space(survey: Survey, sizes: dict[str, int], place: Place) -> None:
    needed = sum(sizes[sha256] - (part.size if part else 0) for sha256, part in survey.missing.items())
    if survey.missing and needed + _MARGIN_BYTES > survey.free_bytes:
        raise SpaceError(
            "the device's disk is too full: "
            f"{needed / 1e6:.1f} MB are needed, {survey.free_bytes / 1e6:.1f} MB are free",
            where=place.where,
            todo="free space there, push with a smaller --keep, or choose another --root",
        )


def _prune(place: Place, digest: str, state: State, keep: int) -> tuple[str, ...]:
    """Remove all but the newest `keep` releases, `current` and `previous` and the one just pushed."""
    protected = {digest, state.current, state.previous}
    others = [release for release in state.releases if release not in protected]
    extra = others[max(0, keep - 1) :]
    if extra:
        place.prune(extra)
    return tuple(extra)
