"""The content-addressed store of a device: ROOT/blobs/sha256/HH/HASH, fed through a Connection.

A blob arrives as `HASH.OWNER.part`, is resumed where an earlier upload broke when what lies there is the
beginning of the file, is flushed to disk, hashed on the device, and renamed. Any POSIX sh with one of openssl,
sha256sum, shasum or python3 is enough. It travels compressed where that pays; the offsets are the file's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeopt.errors import ArtifactError, DeviceError, TransferError
from edgeopt.ports import compression
from edgeopt.ports.connection import Connection, Result, patience_s, script, transfer_error
from edgeopt.ports.posix import FLUSH, HASH, with_functions
from edgeopt.progress import Advance

# $1 root, $2 owner, $3 'look' to change nothing; stdin: "HASH SIZE" lines. Prints "HASH PART_SIZE PART_HASH" of what
# is missing, then which programs unpack, whether the owner's files can be hard links to blobs, inodes, and df's line.
SURVEY = with_functions(
    HASH,
    text="""\
root=$1
[ "$3" = look ] || mkdir -p "$root/blobs/sha256" || exit 1
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
for program in zstd gzip; do
  ! command -v $program >/dev/null || echo "program $program"
done
if [ "$3" != look ] && [ -d "$root/$2/releases" ]; then
  trial=blobs/sha256/.trial.$2.part link=$2/releases/.staging-trial
  rm -f "$root/$link"
  if : > "$root/$trial" && ln "$root/$trial" "$root/$link" 2>/dev/null; then echo linked; else echo copied; fi
  rm -f "$root/$link" "$root/$trial"
fi
near=$root
while [ ! -d "$near" ]; do
  case $near in ?*/*) near=${near%/*} ;; /*) near=/ ;; *) near=. ;; esac
done
echo "inodes $(stat -f -c '%d %c' "$near" 2>/dev/null)"
df -Pk "$near" | tail -n 1
""",
)

_CUT, _DAMAGED, _BUSY = 3, 4, 5

# $1 root, $2 owner, $3 hash, $4 size, $5 offset, $6 what unpacks: the rest of the blob comes on stdin. What a broken
# upload left running may still write what had arrived: it ends in a moment, since its connection is gone. The disk is
# flushed while the processor hashes.
RECEIVE = with_functions(
    FLUSH,
    HASH,
    text=f"""\
root=$1
blob_of "$3"
part=$blob.$2.part
folder=${{blob%/*}}
[ -d "$folder" ] || {{ mkdir -p "$folder" && flush "${{folder%/*}}"; }} || exit 1
[ ! -e "$part" ] || chmod u+w "$part" || exit 1
exec 7>>"$part" || exit 1
if command -v flock >/dev/null; then
  tries=0
  until flock -n 7; do
    tries=$((tries + 1))
    [ $tries -le 10 ] || exit {_BUSY}
    sleep 1
  done
fi
[ "$5" -gt 0 ] || : > "$part" || exit 1
[ "$(wc -c < "$part")" -eq "$5" ] || exit {_CUT}
case $6 in
  zstd) zstd -dcq | cat >&7 ;;
  gzip) gzip -dc | cat >&7 ;;
  *) cat >&7 ;;
esac || {{ rm -f "$part"; exit 1; }}
[ "$(wc -c < "$part")" -ge "$4" ] || exit {_CUT}
chmod 444 "$part" || exit 1
flush "$part" &
flushing=$!
hash_of "$part"
wait $flushing || exit 1
[ "$sum" = "$3" ] || {{ rm -f "$part"; exit {_DAMAGED}; }}
mv -f "$part" "$blob" && flush "$folder"
""",
)


@dataclass(frozen=True)
class Part:
    """What an earlier upload left: `size` bytes whose sha256 is `sha256`."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Survey:
    """What a device lacks: hex sha256 of blobs with what lies there of them, and the room on the device.

    `programs`: which of the compressors it has. `links`: whether a release can be hard links to blobs, None where that
    was not tried. `free_inodes` is None where the file system has no fixed number of them, or stat does not say.
    """

    missing: dict[str, Part | None]
    free_bytes: int
    programs: tuple[str, ...] = ()
    links: bool | None = None
    free_inodes: int | None = None


class BlobStore:
    """The blobs below `root` (on the device, absolute or with `~`). `owner` keeps the parts of two pushers apart.

    `sent_bytes` counts what its uploads sent, which is less than what they moved where it was compressed.
    """

    def __init__(self, connection: Connection, root: str, *, owner: str):
        self._connection = connection
        self._root = root
        self._owner = owner
        self._programs: tuple[str, ...] = ()
        self.sent_bytes = 0

    def survey(self, sizes: Mapping[str, int], *, change: bool = True) -> Survey:
        """Which of the blobs, hex sha256 -> size in bytes, the device lacks. One round trip.

        With `change` False nothing is made there, and whether hard links work is not tried.
        """
        wanted = "".join(f"{sha256} {size}\n" for sha256, size in sizes.items())
        # what lies there of a broken upload is hashed on the way
        timeout_s = patience_s(sum(sizes.values()))
        argv = script(SURVEY, self._root, self._owner, "" if change else "look")
        done = self._connection.run(argv, stdin=wanted.encode(), timeout_s=timeout_s, check=False)
        if done.status != 0:
            raise transfer_error(done, "cannot use the blob store", where=self._where(self._root))
        found = _survey(done.text.splitlines(), self._where(self._root), sizes)
        self._programs = found.programs
        return found

    def upload(self, path: Path, sha256: str, size: int, part: Part | None, *, advance: Advance | None = None) -> int:
        """Send the file `path` as the blob `sha256`, going on after `part` where it is the file's beginning.

        Returns the bytes of the file that were sent, compressed where a sample shrinks and the survey found what
        unpacks it. TransferError where the link is cut (the part stays for the next time) or the bytes arrive damaged,
        SpaceError where the disk is full, ArtifactError where the file here has changed.
        """
        offset = resume_offset(path, size, part)
        if advance is not None:
            advance(offset)
        done = self._send(path, sha256, size, offset, advance)
        where = self._where(f"{self._root}/blobs/sha256/{sha256[:2]}/{sha256}")
        if done.status == _CUT:
            raise TransferError("the upload was cut short", where=where, todo="repeat: the push resumes")
        if done.status == _BUSY:
            raise TransferError(
                "an upload that broke still writes there", where=where, todo="wait a moment, then repeat"
            )
        if done.status == _DAMAGED:
            raise _damaged(path, sha256, where)
        if done.status != 0:
            raise transfer_error(done, f"cannot store {path.name}", where=where)
        return size - offset

    def _send(self, path: Path, sha256: str, size: int, offset: int, advance: Advance | None) -> Result:
        programs = self._programs if self._connection.remote else ()
        method = compression.choose(path, size, offset, programs)
        argv = script(RECEIVE, self._root, self._owner, sha256, str(size), str(offset), method or "")
        with contextlib.ExitStack() as stack:
            if method:
                source = stack.enter_context(compression.Compressed(path, offset, method, advance))
                done = self._connection.run(argv, stdin=source, timeout_s=patience_s(size), check=False)
                self.sent_bytes += source.sent_bytes
                return done
            plain = stack.enter_context(open(path, "rb", buffering=0))
            plain.seek(offset)
            done = self._connection.run(argv, stdin=plain, timeout_s=patience_s(size), check=False, advance=advance)
            self.sent_bytes += plain.tell() - offset
            return done

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


def _survey(lines: list[str], where: str, asked: Collection[str]) -> Survey:
    """The Survey that the device's lines tell of; DeviceError where they tell of something else than was `asked`."""
    try:
        found = _parse_survey(lines, where)
    except (ValueError, IndexError):
        found = None
    if found is None or not set(found.missing) <= set(asked):
        raise DeviceError("the device's answer is not what was asked for", where=where, todo="repeat with --debug")
    return found


def _parse_survey(lines: list[str], where: str) -> Survey:
    missing, programs, links, inodes = {}, [], None, None
    for line in lines[:-1]:
        first, *rest = line.split()
        if first == "program":
            programs += rest
        elif first in ("linked", "copied"):
            links = first == "linked"
        elif first == "inodes":
            inodes = free_inodes(" ".join(rest))
        else:
            sha256, part = _missing(line)
            missing[sha256] = part
    return Survey(missing, free_bytes(lines[-1] if lines else "", where), tuple(programs), links, inodes)


def _missing(line: str) -> tuple[str, Part | None]:
    sha256, size, part_hash = line.split()
    return sha256, Part(int(size), part_hash) if int(size) else None


def free_inodes(counts: str) -> int | None:
    """Of `stat -f -c '%d %c'`; None where it does not say, or the file system has no fixed number, which it calls 0."""
    numbers = counts.split()
    return int(numbers[0]) if len(numbers) == 2 and all(n.isdigit() for n in numbers) and int(numbers[1]) else None


def free_bytes(df: str, where: str) -> int:
    """The 'Available' column of `df -Pk`, in bytes; the file system's name and mount point may hold spaces."""
    columns = re.search(r"\s\d+\s+\d+\s+(-?\d+)\s+\S+%\s", df)
    if columns is None:
        raise DeviceError(f"df said what we do not understand: {df}", where=where, todo="run 'df -Pk' there by hand")
    return max(0, int(columns[1])) * 1024
