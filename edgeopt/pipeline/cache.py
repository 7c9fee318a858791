"""The stage cache: one folder a result, named by the digest of what went in, verified when it is read.

A result is written beside its place and renamed into it, so a killed build leaves whole results or none. The
cache lies in the project's own `.edgeopt/cache`; deleting it costs time and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from edgeopt import digest
from edgeopt.errors import disk_error
from edgeopt.progress import log

_INDEX = "index.json"
_KEEP = 12  # results kept a stage, newest first


class StageCache:
    """Folders below `root`/STAGE/KEY. With `enabled` false nothing is read, and results are still written."""

    def __init__(self, root: Path, *, enabled: bool = True):
        self._root = root
        self._enabled = enabled

    def find(self, stage: str, key: str) -> Path | None:
        """The folder of a whole and unchanged result, or None; a damaged one is removed."""
        folder = self._root / stage / key
        if not self._enabled or not folder.is_dir():
            return None
        try:
            index = json.loads((folder / _INDEX).read_bytes())
            whole = all(digest.of_file(folder / name) == sha for name, sha in index.items())
        except (OSError, ValueError):
            whole = False
        if not whole:
            log.warning("the cached result of stage '%s' is damaged and is made again", stage)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        os.utime(folder)
        return folder

    def store(self, stage: str, key: str, write: Callable[[Path], None]) -> Path:
        """Call `write(folder)` and keep what it wrote as the result of `key`. SpaceError on a full disk."""
        place = self._root / stage / key
        part = None
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned(place.parent)
            part = Path(tempfile.mkdtemp(prefix=".part-", dir=place.parent))
            write(part)
            files = sorted(str(p.relative_to(part)) for p in part.rglob("*") if p.is_file())
            index = {name: digest.of_file(part / name) for name in files}
            (part / _INDEX).write_bytes(digest.canonical_json(index))
            shutil.rmtree(place, ignore_errors=True)
            os.rename(part, place)
            part = None
        except OSError as why:
            raise disk_error(why, place, todo="free space and build again") from why
        finally:
            if part is not None:
                shutil.rmtree(part, ignore_errors=True)
        self._drop_oldest(place.parent)
        return place

    @staticmethod
    def _remove_abandoned(folder: Path) -> None:
        for part in folder.glob(".part-*"):
            if time.time() - part.stat().st_mtime > 24 * 3600:  # left by a killed build
                shutil.rmtree(part, ignore_errors=True)

    @staticmethod
    def _drop_oldest(folder: Path) -> None:
        results = sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=lambda p: p.stat().st_mtime)
        for old in results[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)


def link_or_copy(source: Path, place: Path) -> None:
    """A hard link where the file system has them, else a copy."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
