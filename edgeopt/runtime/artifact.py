"""An artifact: a folder and its manifest. Opening it re-hashes every file; writing it renames it into place."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from edgeopt import digest
from edgeopt.errors import ArtifactError, disk_error
from edgeopt.spec import json_file
from edgeopt.spec import manifest as spec
from edgeopt.spec.manifest import Manifest, Selection
from edgeopt.spec.values import validate

SUFFIX = ".edgeopt"
_NO_SPACE = "free space or give another --out"


@dataclass(frozen=True)
class Artifact:
    """A verified artifact: `folder` on this machine, `manifest` as read from it."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path | str) -> Artifact:
        """The artifact in `folder`, every file re-hashed.

        Raises ArtifactError that names the first file that is missing, is a link, or differs; and where the manifest
        is not the bytes that its digest is taken of, since then something in it means nothing and was put there.
        """
        folder = Path(folder)
        data, source = _manifest_bytes(folder), str(folder / spec.FILE_NAME)
        manifest = spec.decode(data, source=source)
        check_canonical(data, manifest, source=source)
        for name, file in sorted(manifest.files.items()):
            _check(folder, name, file)
        return cls(folder, manifest)

    @property
    def digest(self) -> str:
        return spec.digest(self.manifest)

    def path(self, file: str) -> Path:
        """The path of one of the manifest's files on this machine."""
        return self.folder / spec.safe_path(file)

    def selection(self) -> Selection | None:
        """What `selection.json` says, or None where there is none."""
        path = self.folder / spec.SELECTION_NAME
        if not path.is_file():
            return None
        what, todo = spec.SELECTION_NAME, "delete the file, or build again"
        data = json_file.read(path.read_bytes(), what=what, source=str(path), error=ArtifactError, todo=todo)
        return validate(Selection, data, source=str(path), error=ArtifactError)

    def write_selection(self, selection: Selection) -> None:
        """Replace `selection.json` atomically."""
        replace_file(self.folder / spec.SELECTION_NAME, digest.canonical_json(selection.model_dump(mode="json")))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, checked in itself, its files not hashed. ArtifactError where there is none."""
    return spec.decode(_manifest_bytes(folder), source=str(folder / spec.FILE_NAME))


def _manifest_bytes(folder: Path) -> bytes:
    path = folder / spec.FILE_NAME
    if not folder.is_dir():
        raise ArtifactError("no such artifact", where=str(folder), todo="give the folder that 'edgeopt build' named")
    if path.is_symlink() or not path.is_file():
        raise ArtifactError(
            "this folder is no artifact: it has no manifest.json", where=str(folder),
            todo="give the folder that 'edgeopt build' named",
        )  # fmt: skip
    if path.stat().st_size > spec.MAX_MANIFEST_BYTES:
        raise ArtifactError("the manifest is absurdly large", where=str(path), todo="build the artifact again")
    return path.read_bytes()


def check_canonical(data: bytes, manifest: Manifest, *, source: str) -> None:
    """ArtifactError where `data` is not the canonical form of `manifest`: the digest would not cover all of it."""
    if data != spec.encode(manifest):
        raise ArtifactError(
            "the manifest is not in the form that edgeopt writes: it was edited, or another version made it",
            where=source, todo="copy or build the artifact again",
        )  # fmt: skip


def publish(staging: Path, out: Path, manifest: Manifest) -> Artifact:
    """Make the finished folder `staging` the artifact `out`: manifest written last, fsynced, renamed into place.

    `staging` must lie on the file system of `out`. An artifact that stands at `out` is replaced, and its
    `reports/` are kept. A folder at `out` that is no artifact is refused with ArtifactError.
    """
    if out.exists() and any(out.iterdir()) and not (out / spec.FILE_NAME).is_file():
        raise ArtifactError("the output folder holds something else", where=str(out), todo="give another --out")
    try:
        for name in sorted(manifest.files):
            sync(staging / name)
        replace_file(staging / spec.FILE_NAME, spec.encode(manifest))
        replace_folder(staging, out)
    except OSError as why:
        raise disk_error(why, out, todo=_NO_SPACE, error=ArtifactError) from why
    return Artifact(out, manifest)


def replace_folder(staging: Path, out: Path) -> None:
    """Rename `staging` to `out`, on the same file system; the reports of an artifact that is there are kept."""
    if (out / spec.REPORTS_DIR).is_dir() and not (staging / spec.REPORTS_DIR).exists():
        shutil.copytree(out / spec.REPORTS_DIR, staging / spec.REPORTS_DIR)
    _swap(staging, out)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old bytes or the new ones, and never half."""
    # two validations at once write one artifact's selection
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(part, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as why:
        part.unlink(missing_ok=True)
        raise disk_error(why, path, todo=_NO_SPACE, error=ArtifactError) from why


def _swap(staging: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    old = None
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
        os.rename(out, old / "artifact")
    try:
        os.rename(staging, out)
    except OSError:
        if old is not None:
            os.rename(old / "artifact", out)
        raise
    finally:
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    sync(out.parent)


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or what was renamed in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(folder: Path, name: str, file: spec.File) -> None:
    path = folder / name
    where = str(path)
    todo = "copy or build the artifact again"
    if any(p.is_symlink() for p in [path, *path.parents] if p != folder and folder in p.parents):
        raise ArtifactError("a file of the artifact is a symbolic link", where=where, todo=todo)
    if not path.is_file():
        raise ArtifactError("a file of the artifact is missing", where=where, todo=todo)
    size = path.stat().st_size
    if size != file.size:
        raise ArtifactError(f"a file of the artifact has {size} bytes instead of {file.size}", where=where, todo=todo)
    if digest.of_file(path) != file.sha256:
        raise ArtifactError("a file of the artifact has changed since it was built", where=where, todo=todo)
