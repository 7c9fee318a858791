"""The recorded devices of edgeopt.testing, and a device that answers as one of them through a real shell."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from edgeopt.ports.local import LocalConnection

FOLDER = Path(__file__).parents[2] / "edgeopt" / "testing" / "recordings"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
# what the script itself needs
TOOLS = ("sh", "head", "grep", "date", "id", "df", "sleep", "uname", "kill", "cat")


class Shell(LocalConnection):
    """This machine, its commands run by `shell` (argv of a POSIX shell) with only the tools of `folder` on the PATH."""

    def __init__(self, folder: Path, shell: list[str], **environment: str):
        self.folder, self.shell, self.runs = folder, shell, 0
        self.environment = {"PATH": str(folder), "HOME": str(folder), "SHELL": "/bin/own", **environment}

    def run(self, argv, **options):
        self.runs += 1
        assert argv[0] == "sh"
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return super().run(["/usr/bin/env", "-i", *settings, *self.shell, *argv[1:]], **options)


def tools(folder: Path, *more: str, **scripts: str) -> Path:
    """`folder` with links to TOOLS and `more`, and sh scripts by name."""
    folder.mkdir()
    for name in (*TOOLS, *more):
        os.symlink(shutil.which(name), folder / name)
    for name, body in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text("#!/bin/sh\n" + body + "\n")
        path.chmod(0o755)
    return folder
