"""An artifact as one file: a plain POSIX tar, of which the manifest determines every byte but the files' contents.

    NAME.edgeopt/manifest.json
    NAME.edgeopt/manifest.signed, manifest.sig, selection.json       those that are there
    NAME.edgeopt/FILE ...                                            those of the manifest, sorted
    zeros up to a multiple of 10,240 bytes

Owner 0, mode 0644, time 0. Any `tar` reads it. What reads it here parses nothing but the manifest: each header must be
the very bytes that `header` gives for the file that comes next, so that there is no place for a link, a device, a path
or a size of somebody else's choice. Not compressed: the bytes of zlib and zstd change with their versions, weights
hardly shrink, and what cannot expand cannot be a bomb.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from edgeopt.errors import ArtifactError
from edgeopt.runtime.artifact import SUFFIX, check_canonical
from edgeopt.spec import manifest as spec
from edgeopt.spec.manifest import Manifest

BLOCK_BYTES, RECORD_BYTES = 512, 10_240
# what may stand between the manifest and its files, in this order, and the most bytes of each
EXTRAS = {
    spec.STATEMENT_NAME: spec.MAX_MANIFEST_BYTES,
    spec.SIGNATURE_NAME: spec.MAX_SIGNATURE_BYTES,
    spec.SELECTION_NAME: 1 << 20,
}
_PIECE_BYTES = 1 << 20
_TODO = "copy it again, or pack the artifact again"

_KINDS = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"5": "a folder of its own",
    b"6": "a named pipe", b"7": "a reserved kind of file", b"S": "a sparse file", b"L": "a GNU long name",
    b"K": "a GNU long link", b"g": "a global header", b"x": "an extended header", b"V": "a volume label",
    b"M": "the rest of another file", b"D": "a GNU folder list",
}  # fmt: skip
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz",
               b"PK": "unzip"}  # fmt: skip

Sink = Callable[[str, Iterator[bytes]], None]
"""Called with a file's name and its pieces, all of which it takes."""


def header(manifest_name: str, file: str, size: int) -> bytes:
    """The header of a file of the artifact: 512 bytes, more where its name or size does not fit in these."""
    info = tarfile.TarInfo(f"{manifest_name}{SUFFIX}/{file}")
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size: int) -> int:
    """Zeros after `size` bytes, up to the next block."""
    return -size % BLOCK_BYTES


def end(position: int) -> int:
    """Zeros after the last file, which ended at `position`: two blocks at least, up to a whole record."""
    return 2 * BLOCK_BYTES + -(position + 2 * BLOCK_BYTES) % RECORD_BYTES


@dataclass
class Reader:
    """A stream that is read once, in order. `source` names it; `position` is how many bytes were read."""

    stream: BinaryIO
    source: str
    size: int
    position: int = 0

    def exactly(self, count: int) -> bytes:
        """The next `count` bytes. ArtifactError where the stream ends before, or cannot be read."""
        try:
            data = self.stream.read(count)
        except OSError as why:
            raise ArtifactError(f"cannot read it: {why.strerror or why}", where=self.source, todo=_TODO) from None
        self.position += len(data)
        if len(data) != count:
            raise self.wrong(f"the file ends early, after {self.position} bytes")
        return data

    def pieces(self, count: int) -> Iterator[bytes]:
        """The next `count` bytes, in pieces of at most 1 MiB."""
        while count:
            piece = self.exactly(min(count, _PIECE_BYTES))
            count -= len(piece)
            yield piece

    def zeros(self, count: int) -> None:
        """Skip `count` bytes, all of which are 0."""
        if any(self.exactly(count)):
            raise self.wrong("something stands between the files, where nothing belongs")

    def wrong(self, what: str) -> ArtifactError:
        return ArtifactError(what, where=self.source, todo=_TODO)


def read_manifest(reader: Reader) -> tuple[Manifest, bytes]:
    """The manifest with which the file begins, and its bytes."""
    block = reader.exactly(BLOCK_BYTES)
    _refuse_other_formats(block, reader)
    first, _, rest = _name(block).partition(SUFFIX + "/")
    size = _size(block)
    if rest != spec.FILE_NAME or size is None or _header(first, rest, size) != block:
        raise _unexpected(block, spec.FILE_NAME, reader)
    if size > spec.MAX_MANIFEST_BYTES:
        raise reader.wrong("the manifest is absurdly large")
    data = reader.exactly(size)
    reader.zeros(padding(size))
    manifest = spec.decode(data, source=f"{reader.source}: {spec.FILE_NAME}")
    check_canonical(data, manifest, source=f"{reader.source}: {spec.FILE_NAME}")
    if manifest.name != first:
        raise reader.wrong(f"the folder in it is '{first}{SUFFIX}', and the artifact's name '{manifest.name}'")
    left = sum(len(header(first, n, f.size)) + f.size + padding(f.size) for n, f in manifest.files.items())
    if reader.position + left > reader.size:
        raise reader.wrong(f"the file ends early: it has {reader.size} bytes, and {reader.position + left} are needed")
    return manifest, data


def read_files(reader: Reader, manifest: Manifest, sink: Sink) -> None:
    """Give `sink` every file after the manifest, one after the other; what they hold is for the sink to check."""
    block = reader.exactly(BLOCK_BYTES)
    for file, most in EXTRAS.items():
        size = _size(block)
        if size is not None and size <= most and _header(manifest.name, file, size) == block:
            sink(file, reader.pieces(size))
            reader.zeros(padding(size))
            block = reader.exactly(BLOCK_BYTES)
    for file in sorted(manifest.files):
        size = manifest.files[file].size
        expected = header(manifest.name, file, size)
        if block != expected[:BLOCK_BYTES] or reader.exactly(len(expected) - BLOCK_BYTES) != expected[BLOCK_BYTES:]:
            raise _unexpected(block, file, reader)
        sink(file, reader.pieces(size))
        reader.zeros(padding(size))
        block = reader.exactly(BLOCK_BYTES)
    if any(block):
        raise _unexpected(block, "the end", reader)
    reader.zeros(end(reader.position - BLOCK_BYTES) - BLOCK_BYTES)
    if reader.position != reader.size:
        raise reader.wrong("something follows after the end of the archive")


def _refuse_other_formats(block: bytes, reader: Reader) -> None:
    for magic, command in _COMPRESSED.items():
        if block.startswith(magic):
            raise ArtifactError(
                "this file is compressed, and 'edgeopt artifact pack' does not compress", where=reader.source,
                todo=f"expand it ({command}), then unpack what comes out",
            )  # fmt: skip


def _unexpected(block: bytes, expected: str, reader: Reader) -> ArtifactError:
    """What stands at a header's place, in words."""
    if not any(block):
        return reader.wrong(f"the archive ends where '{expected}' belongs")
    if block[257:263] != b"ustar\0":
        return reader.wrong(
            f"no header stands where '{expected}' belongs: this is no packed artifact, or it is damaged"
        )
    name, kind = _name(block)[:200], block[156:157]
    if kind in _KINDS:
        return reader.wrong(f"the archive holds {_KINDS[kind]}, {name!r}, where '{expected}' belongs")
    if name.endswith("/" + expected):
        return reader.wrong(f"the header of '{expected}' is not the one that the manifest determines")
    return reader.wrong(f"the archive holds {name!r} where '{expected}' belongs")


def _header(name: str, file: str, size: int) -> bytes:
    """As `header`; nothing where that is more than a block, which these names are too short for."""
    try:
        made = header(name, file, size)
    except (ValueError, UnicodeError):
        return b""
    return made if len(made) == BLOCK_BYTES else b""


def _name(block: bytes) -> str:
    name, prefix = block[:100].rstrip(b"\0"), block[345:500].rstrip(b"\0")
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "replace")


def _size(block: bytes) -> int | None:
    digits = block[124:136].rstrip(b"\0 ")
    return int(digits, 8) if digits and all(48 <= d < 56 for d in digits) else None
