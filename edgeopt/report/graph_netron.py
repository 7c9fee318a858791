"""A model file shown by netron, the viewer of model files, on this machine's loopback address."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeopt.errors import EdgeoptError

_STARTS = 5


@contextlib.contextmanager
def served(path: Path, *, browse: bool) -> Iterator[str]:
    """Serve the file for the time of the `with` block; yields the address. `browse` opens a browser with it.

    Raises EdgeoptError where netron is not installed.
    """
    try:
        import netron
    except ImportError:
        raise EdgeoptError("netron is not installed", where="--netron", todo="pip install 'edgeopt[netron]'") from None
    logging.getLogger("netron").setLevel(logging.WARNING)
    host, port = _started(netron, path, browse)
    try:
        yield f"http://{host}:{port}"
    finally:
        netron.stop((host, port))


def _started(netron: Any, path: Path, browse: bool) -> tuple[str, int]:
    """Where it serves. netron asks for a free port, gives it back and takes it: another process may be in between."""
    for left in reversed(range(_STARTS)):
        try:
            return netron.start(str(path), address=("127.0.0.1", 0), browse=browse)
        except OSError as why:
            if why.errno != errno.EADDRINUSE or not left:
                raise
    raise AssertionError
