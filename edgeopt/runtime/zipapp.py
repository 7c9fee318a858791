"""`onboard.pyz`: the runner as one file, whose bytes depend only on the sources of `edgeopt.onboard`."""

from __future__ import annotations

import io
import zipfile
from importlib.resources import files
from pathlib import Path

FILE_NAME = "onboard.pyz"

_SHEBANG = b"#!/usr/bin/env python3\n"
# an older Python is told so before the first import that it does not know
_START = b'''"""Starts the runner."""
import sys

if sys.version_info < (3, 6):
    sys.exit("the runner needs Python 3.6 or newer, this is %d.%d" % sys.version_info[:2])
from onboard.__main__ import start

start()
'''
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip can hold


def pack() -> bytes:
    """The bytes of the zipapp: members sorted, dated 1980, stored, since zlib's output differs by version."""
    members = {f"onboard/{s.name}": s.read_bytes() for s in files("edgeopt.onboard").iterdir() if _is_source(s.name)}
    members["__main__.py"] = _START
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = 3  # Unix, whatever the host
            info.external_attr = 0o100644 << 16
            archive.writestr(info, members[name])
    return _SHEBANG + buffer.getvalue()


def write_zipapp(folder: Path | str) -> Path:
    """Write `onboard.pyz` into `folder` and return its path."""
    path = Path(folder) / FILE_NAME
    path.write_bytes(pack())
    return path


def _is_source(name: str) -> bool:
    return name.endswith(".py")
