"""A model file shown by netron, the viewer of model files, on this machine's loopback address."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from edgeopt.errors import EdgeoptError


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
    host, port = netron.start(str(path), address=("127.0.0.1", 0), browse=browse)
    try:
        yield f"http://{host}:{port}"
    finally:
        netron.stop((host, port))
