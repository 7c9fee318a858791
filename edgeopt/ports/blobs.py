"""The content-addressed store of a device: ROOT/blobs/sha256/HH/HASH, fed through a Connection.

A blob arrives as `HASH.OWNER.part`, is resumed where an earlier upload broke when what lies there is the
beginning of the file, is flushed to disk, hashed on the device, and renamed. Any POSIX sh with one of openssl,
sha256sum, shasum or python3 is enough.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeopt.errors import ArtifactError, DeviceError, TransferError
from edgeopt.ports.connection import Connection, patience_s, script, transfer_error
from edgeopt.progress import Advance

# openssl first: Debian's sha256sum does not use the CPU's SHA instructions and takes six times as long
_HASH = """\
LC_ALL=C; export LC_ALL
blob_of() { blob=$root/blobs/sha256/${1%"${1#??}"}/$1; }
hash_of() {
  sum=$(openssl dgst -sha256 -r < "$1" 2>/dev/null || sha256sum < "$1" 2>/dev/null ||
    shasum -a 256 < "$1" 2>/dev/null || python3 -c '
import hashlib, sys
h = hashlib.sha256()
for piece in iter(lambda: sys.stdin.buffer.read(1 << 20), b""):
    h.update(piece)
print(h.hexdigest())' < "$1") || { echo "no openssl, sha256sum, shasum or python3 to hash with" >&2; exit 1; }
  sum=${sum%% *}
}
"""

# $1 root, $2 owner; stdin: "HASH SIZE" lines. Prints "HASH PART_SIZE PART_HASH" of what is missing, then df's line.
_SURVEY = (
    _HASH
    + """\
root=$1
mkdir -p "$root/blobs/sha256" || exit 1
while read -r hash size; do
  blob_of "$hash"
  [ -f "$blob" ] && [ "$(wc -c < "$blob")" -eq "$size" ] && continue
  if [ -f "$blob.$2.part" ]; then
    hash_of "$blob.$2.part"
    echo "$hash $(wc -c < "$blob.$2.part") $sum"
  else
    echo "$hash 0 -"
  fi
done
df -Pk "$root" | tail -n 1
"""
)

_CUT, _DAMAGED = 3, 4

# $1 root, $2 owner, $3 hash, $4 size, $5 offset: the rest of the blob comes on stdin. The disk is flushed while the
# processor hashes.
_RECEIVE = (
    _HASH
    + f"""\
root=$1
blob_of "$3"
part=$blob.$2.part
mkdir -p "${{blob%/*}}" || exit 1
[ "$5" -gt 0 ] || : > "$part" || exit 1
cat >> "$part" || {{ rm -f "$part"; exit 1; }}
[ "$(wc -c < "$part")" -ge "$4" ] || exit {_CUT}
{{ sync "$part" 2>/dev/null || sync; }} &
hash_of "$part"
wait
[ "$sum" = "$3" ] || {{ rm -f "$part"; exit {_DAMAGED}; }}
chmod 444 "$part"
mv -f "$part" "$blob" || exit 1
sync "${{blob%/*}}" 2>/dev/null || sync
"""
)


@dataclass(frozen=True)
class Part:
    """What an earlier upload left: `size` bytes whose sha256 is `sha256`."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Survey:
    """Which blobs are missing, with what an earlier upload left of them, and the room on the device."""

    missing: dict[str, Part | None]
    free_bytes: int


class BlobStore:
    """The blobs below `root` (an absolute path on the device). `owner` keeps the parts of two pushers apart."""

    def __init__(self, connection: Connection, root: str, *, owner: str):
        self._connection = connection
        self._root = root
        self._owner = owner

    def survey(self, sizes: Mapping[str, int]) -> Survey:
        """Which of the blobs, hex sha256 -> size in bytes, the device lacks. One round trip."""
        wanted = "".join(f"{sha256} {size}\n" for sha256, size in sizes.items())
        # what lies there of a broken upload is hashed on the way
        timeout_s = patience_s(sum(sizes.values()))
        done = self._connection.run(
            script(_SURVEY, self._root, self._owner), stdin=wanted.encode(), timeout_s=timeout_s, check=False
        )
        if done.status != 0:
            raise transfer_error(done, "cannot use the blob store", where=self._where(self._root))
        *lines, df = done.text.splitlines()
        return Survey(dict(_missing(line) for line in lines), _free_bytes(df, self._where(self._root)))

    def upload(self, path: Path, sha256: str, size: int, part: Part | None, *, advance: Advance | None = None) -> int:
        """Send the file `path` as the blob `sha256`, going on after `part` where it is the file's beginning.

        Returns the bytes sent. TransferError where the link is cut (the part stays for the next time) or the bytes
        arrive damaged, SpaceError where the disk is full, ArtifactError where the file here has changed.
        """
        offset = resume_offset(path, size, part)
        if advance is not None:
            advance(offset)
        with open(path, "rb", buffering=0) as source:
            source.seek(offset)
            argv = script(_RECEIVE, self._root, self._owner, sha256, str(size), str(offset))
            done = self._connection.run(argv, stdin=source, timeout_s=patience_s(size), check=False, advance=advance)
        where = self._where(f"{self._root}/blobs/sha256/{sha256[:2]}/{sha256}")
        if done.status == _CUT:
            raise TransferError("the upload was cut short", where=where, todo="repeat: the push resumes")
        if done.status == _DAMAGED:
            raise _damaged(path, sha256, where)
        if done.status != 0:
            raise transfer_error(done, f"cannot store {path.name}", where=where)
        return size - offset

    def _where(self, path: str) -> str:
        return f"{self._connection.label}:{path}"


def resume_offset(path: Path, size: int, part: Part | None) -> int:
    """Bytes of `path` that need not be sent again: the size of `part` when it is the beginning of the file, else 0."""
    if part is None or not 0 < part.size <= size:
        return 0
    h = hashlib.sha256()
    left = part.size
    with open(path, "rb") as f:
        while left and (piece := f.read(min(left, 1 << 20))):
            h.update(piece)
            left -= len(piece)
    return part.size if h.hexdigest() == part.sha256 else 0


def _damaged(path: Path, sha256: str, where: str) -> Exception:
    from edgeopt import digest

    if not os.path.exists(path) or digest.of_file(path) != sha256:
        return ArtifactError(
            "a file of the artifact changed while it was pushed", where=str(path), todo="build or copy it again"
        )
    return TransferError("the bytes arrived damaged", where=where, todo="repeat; if it happens again, check the disk")


def _missing(line: str) -> tuple[str, Part | None]:
    sha256, size, part_hash = line.split()
    return sha256, Part(int(size), part_hash) if int(size) else None


def _free_bytes(df: str, where: str) -> int:
    """The 'Available' column of `df -Pk`, in bytes; the file system's name and mount point may hold spaces."""
    columns = re.search(r"\s\d+\s+\d+\s+(-?\d+)\s+\S+%\s", df)
    if columns is None:
        raise DeviceError(f"df said what we do not understand: {df}", where=where, todo="run 'df -Pk' there by hand")
    return max(0, int(columns[1])) * 1024
