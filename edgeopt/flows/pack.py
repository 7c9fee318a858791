"""Pack and unpack: an artifact as one file, for a stick or a file server, with the checks that opening one has."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeopt.errors import ArtifactError, EdgeoptError, SpaceError, UsageError, disk_error
from edgeopt.progress import SILENT, Advance, Progress
from edgeopt.runtime import artifact_file
from edgeopt.runtime.artifact import SUFFIX, Artifact, replace_folder, sync
from edgeopt.runtime.artifact_file import Reader
from edgeopt.spec import manifest as spec

FILE_SUFFIX = SUFFIX + ".tar"
_PIECE_BYTES = 1 << 20
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Packed:
    """An artifact that was packed into `path`, or unpacked to it. `signed`: its signature went along, unchecked."""

    name: str
    digest: str
    path: str
    size_bytes: int
    signed: bool

    def as_dict(self) -> dict:
        return asdict(self)


def pack(artifact: Artifact, out: Path | None = None, *, progress: Progress = SILENT) -> Packed:
    """Write `artifact` into the file `out` (a folder: into it; None: NAME.edgeopt.tar here); the same bytes each time.

    The file appears whole under its name, or not at all. build.json and reports stay behind, as with a push. Raises
    ArtifactError where a file changes meanwhile, SpaceError where the disk is full or cannot hold a file so large.
    """
    default = artifact.manifest.name + FILE_SUFFIX
    out = Path(default) if out is None else out / default if out.is_dir() else out
    if artifact.folder.resolve() in out.resolve().parents:
        raise UsageError("the file would lie in the artifact itself", where=str(out), todo="give another FILE")
    part = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        with open(fd, "wb") as f:
            _write(artifact, f, progress)
            f.flush()
            os.fsync(fd)
        os.replace(part, out)
        sync(out.parent)
    except OSError as why:
        raise _cannot_write(why, out) from why
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    signed = (artifact.folder / spec.SIGNATURE_NAME).is_file()
    return Packed(artifact.manifest.name, artifact.digest, str(out), out.stat().st_size, signed)


def unpack(file: Path, folder: Path | None = None, *, progress: Progress = SILENT) -> Packed:
    """Make the artifact in `file` the folder `folder` (None: NAME.edgeopt here), which appears when all is verified.

    An artifact that is there is replaced, its reports are kept; another folder is refused. Nothing is written beside
    a staging folder next to `folder`, which goes with the first thing that is wrong. Raises ArtifactError that names
    it, SpaceError before anything is written where the disk is too small.
    """
    with _opened(file) as reader:
        manifest, data = artifact_file.read_manifest(reader)
        out = Path(manifest.name + SUFFIX) if folder is None else folder
        _check_place(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            _check_space(out.parent, sum(f.size for f in manifest.files.values()))
            with (
                _staging(out) as staging,
                progress.bar(f"unpack {manifest.name}", reader.size, unit="bytes") as advance,
            ):
                _store(staging / spec.FILE_NAME, [data], advance)
                artifact_file.read_files(
                    reader, manifest, lambda name, pieces: _take(staging, manifest, name, pieces, advance, reader)
                )
                opened = Artifact.open(staging)
                _sync_folders(staging)
                replace_folder(staging, out)
        except OSError as why:
            raise _cannot_write(why, out) from why
    signed = (out / spec.SIGNATURE_NAME).is_file()
    return Packed(manifest.name, opened.digest, str(out), reader.size, signed)


def _write(artifact: Artifact, f, progress: Progress) -> None:
    manifest, name = artifact.manifest, artifact.manifest.name
    extras = [extra for extra in artifact_file.EXTRAS if (artifact.folder / extra).is_file()]
    sizes = {file: manifest.files[file].size for file in sorted(manifest.files)}
    with progress.bar(f"pack {name}", sum(sizes.values()), unit="bytes") as advance:
        for file in [spec.FILE_NAME, *extras, *sizes]:
            path = artifact.folder / file
            size = sizes.get(file, path.stat().st_size)
            if size > artifact_file.EXTRAS.get(file, spec.MAX_FILE_BYTES):
                raise ArtifactError("the file is absurdly large", where=str(path), todo="delete it")
            f.write(artifact_file.header(name, file, size))
            digest = _copy(path, f, size, advance)
            if digest != (artifact.digest if file == spec.FILE_NAME else _expected(manifest, file, digest)):
                raise _changed(path)
            f.write(bytes(artifact_file.padding(size)))
        f.write(bytes(artifact_file.end(f.tell())))


def _copy(path: Path, f, size: int, advance: Advance) -> str:
    """sha256 of the `size` bytes of `path` that were written to `f`."""
    h = hashlib.sha256()
    with open(path, "rb") as source:
        while size and (piece := source.read(min(size, _PIECE_BYTES))):
            h.update(piece)
            f.write(piece)
            size -= len(piece)
            advance(len(piece))
        if size or source.read(1):
            raise _changed(path)
    return h.hexdigest()


def _expected(manifest: spec.Manifest, file: str, digest: str) -> str:
    """What the manifest says of `file`; of what it does not list, whatever was found."""
    return manifest.files[file].sha256 if file in manifest.files else digest


def _changed(path: Path) -> ArtifactError:
    return ArtifactError("a file of the artifact changes while it is packed", where=str(path), todo="pack it again")


def _take(staging: Path, manifest: spec.Manifest, name: str, pieces, advance: Advance, reader: Reader) -> None:
    path = staging / spec.safe_path(name)
    for parent in reversed(path.relative_to(staging).parents):
        (staging / parent).mkdir(0o755, exist_ok=True)  # `parents=True` would take 0777 for those between
    digest = _store(path, pieces, advance)
    if digest != _expected(manifest, name, digest):
        raise reader.wrong(f"'{name}' in it is damaged: its sha256 is not the one of the manifest")


def _store(path: Path, pieces, advance: Advance) -> str:
    """Write a new file of mode 0644 less the umask, flushed to disk; its sha256."""
    h = hashlib.sha256()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as f:
        for piece in pieces:
            h.update(piece)
            f.write(piece)
            advance(len(piece))
        f.flush()
        os.fsync(f.fileno())
    return h.hexdigest()


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Reader]:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe without a writer would hold us for ever
        with open(fd, "rb") as stream:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ArtifactError("this is no plain file", where=str(file), todo="give a file that 'pack' wrote")
            yield Reader(stream, str(file), found.st_size)
    except IsADirectoryError:
        raise ArtifactError("this is a folder", where=str(file), todo="give a file that 'pack' wrote") from None
    except FileNotFoundError as why:
        if why.filename != str(file) and why.filename != file:
            raise
        raise ArtifactError("there is no such file", where=str(file), todo="give a file that 'pack' wrote") from None


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, removed at the end unless it was renamed; those of unpackers that died go too."""
    prefix = f".{out.name[:100]}.unpack-"
    for left in out.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), _held(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        with _held(made):
            inner = made / "artifact"  # mkdtemp's own is for us alone, this one has the modes that the umask leaves
            inner.mkdir(0o755)
            yield inner
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder locked for the time of the block, which ends with the process. OSError where another has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _check_place(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ArtifactError("something else is in the way", where=str(out), todo="give another FOLDER")
    if out.exists() and any(out.iterdir()) and not (out / spec.FILE_NAME).is_file():
        raise ArtifactError("the folder holds something else", where=str(out), todo="give another FOLDER")


def _check_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if needed + _MARGIN_BYTES > free:
        raise SpaceError(
            f"the disk is too full: {needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free",
            where=str(parent), todo="free space, or give another FOLDER",
        )  # fmt: skip


def _sync_folders(folder: Path) -> None:
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync(path)


def _cannot_write(why: OSError, path: Path) -> EdgeoptError:
    if why.errno == errno.EFBIG:  # vfat ends at 4 GB
        return SpaceError(
            "the file is larger than this file system takes", where=str(path),
            todo="format the stick as exFAT or ext4, or copy the artifact's folder",
        )  # fmt: skip
    return disk_error(why, path, error=ArtifactError)
