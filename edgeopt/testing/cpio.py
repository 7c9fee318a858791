"""An initramfs: a cpio archive in the kernel's format (Documentation/driver-api/early-userspace/buffer-format.rst)."""

from __future__ import annotations

import gzip

_DIRECTORY, _FILE, _LINK = 0o040755, 0o100755, 0o120777


def initramfs(files: dict[str, bytes], links: dict[str, str]) -> bytes:
    """The gzipped archive of `files` {path: content}, all executable, and symlinks {path: target}."""
    folders = sorted(
        {"/".join(path.split("/")[:i]) for path in (*files, *links) for i in range(1, path.count("/") + 1)}
    )
    entries = [
        *((path, _DIRECTORY, b"") for path in folders),
        *((path, _FILE, data) for path, data in sorted(files.items())),
        *((path, _LINK, target.encode()) for path, target in sorted(links.items())),
        ("TRAILER!!!", 0, b""),
    ]
    out = bytearray()
    for number, (path, mode, data) in enumerate(entries, 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return gzip.compress(bytes(out), 1, mtime=0)
