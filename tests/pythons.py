"""Real interpreters of other versions, for what must run on the Pythons of JetPack 4 to 7."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.conftest import absent


def find(version: str) -> str | None:
    """The path of a Python of `version` ('3.6'): on the PATH, or among pyenv's versions; None where there is none."""
    candidates = [shutil.which(f"python{version}")]
    roots = [Path(os.environ["PYENV_ROOT"])] if "PYENV_ROOT" in os.environ else []
    for root in [*roots, Path.home() / ".pyenv"]:
        candidates += sorted(str(p) for p in root.glob(f"versions/{version}.*/bin/python"))
    return next((c for c in candidates if c and _works(c, version)), None)


def require(version: str) -> str:
    """As `find`, but skips the test where there is none; under CI that is a failure."""
    found = find(version)
    if found is None:
        absent(f"no Python {version} on this machine (pyenv install {version})")
    return found


def _works(path: str, version: str) -> bool:
    """pyenv's shims are on the PATH for versions that are not switched on: only running one tells."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=30)
    except OSError:
        return False
    return done.stdout.strip() == version
