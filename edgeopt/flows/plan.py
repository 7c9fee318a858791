"""What a push would do, found out without changing anything on the device: `edgeopt push --dry-run`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from edgeopt.errors import SpaceError
from edgeopt.flows import place_scripts, torch_versions
from edgeopt.flows.place import DEFAULT_ROOT, State, parse_state
from edgeopt.flows.push import KEEP, blobs_of, shortage, sizes_of, to_prune
from edgeopt.ports import compression
from edgeopt.ports.blobs import BlobStore, Part, resume_offset
from edgeopt.ports.connection import Connection, script
from edgeopt.runtime.artifact import Artifact


@dataclass(frozen=True)
class FileToMove:
    """A file that the device lacks. `resume_at`: bytes that are there already; `method`: how it would be compressed."""

    path: str
    size_bytes: int
    resume_at: int
    method: str | None
    about_bytes: int  # that would travel, by samples of the file


@dataclass(frozen=True)
class Planned:
    """What a push would do. `short_of`: why the disk is too small for it, None where it is not."""

    name: str
    digest: str
    host: str
    root: str
    already_there: bool
    files: tuple[FileToMove, ...]
    blobs_skipped: int
    free_bytes: int
    free_inodes: int | None
    prune: tuple[str, ...]
    short_of: str | None

    @property
    def move_bytes(self) -> int:
        """Of files that would travel, before they are compressed."""
        return sum(file.size_bytes - file.resume_at for file in self.files)

    @property
    def about_bytes(self) -> int:
        return sum(file.about_bytes for file in self.files)

    def as_dict(self) -> dict:
        return {**asdict(self), "move_bytes": self.move_bytes, "about_bytes": self.about_bytes}

    def check(self) -> None:
        """SpaceError where the push would be refused for want of room."""
        if self.short_of:
            after = "; the releases that would be removed make room first" if self.prune else ""
            raise SpaceError(
                f"the device's disk is too full: {self.short_of}{after}", where=f"{self.host}:{self.root}",
                todo="edgeopt status HOST --gc, a smaller --keep, or another --root",
            )  # fmt: skip


def plan(artifact: Artifact, connection: Connection, *, root: str | None = None, keep: int = KEEP) -> Planned:
    """What `push` of the same arguments would do now. Nothing is made, locked or sent. For the errors see `push`."""
    name = artifact.manifest.name
    root = connection.expand(root or artifact.manifest.root or DEFAULT_ROOT)
    state = _state(connection, f"{root}/{name}")
    blobs = blobs_of(artifact)
    sizes = sizes_of(blobs)
    survey = BlobStore(connection, root, owner=name).survey(sizes, change=False)
    there = artifact.digest in state.releases
    if not there:
        torch_versions.check(artifact, connection)
    missing = {} if there else survey.missing
    programs = survey.programs if connection.remote else ()
    return Planned(
        name=name, digest=artifact.digest, host=connection.label, root=root, already_there=there,
        files=tuple(_file(artifact, blobs, sha256, part, programs) for sha256, part in missing.items()),
        blobs_skipped=len(blobs) - len(missing), free_bytes=survey.free_bytes, free_inodes=survey.free_inodes,
        prune=to_prune(state, artifact.digest, keep), short_of=None if there else shortage(survey, sizes),
    )  # fmt: skip


def _state(connection: Connection, path: str) -> State:
    """As Place.state, where there may be no place yet."""
    done = connection.run(script(place_scripts.STATE, path), check=False)
    return parse_state(done.text if done.status == 0 else "")


def _file(artifact: Artifact, blobs: dict, sha256: str, part: Part | None, programs: tuple[str, ...]) -> FileToMove:
    path = blobs[sha256]
    size = path.stat().st_size
    offset = resume_offset(path, size, part)
    method = compression.choose(path, size, offset, programs)
    share = compression.shrinks_to(path, size, offset, method) if method else 1
    relative = path.relative_to(artifact.folder).as_posix()
    return FileToMove(relative, size, offset, method, round(share * (size - offset)))
