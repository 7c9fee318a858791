"""Recorded devices, as `recordings/NAME/` has them: `files/` and `commands/`. See recordings/README.md."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edgeopt.errors import UsageError

FOLDER = Path(__file__).with_name("recordings")


@dataclass(frozen=True)
class Recording:
    """One recorded device."""

    name: str
    folder: Path

    @property
    def kernel(self) -> str:
        """What `uname -r` says there: '5.10.216-tegra'."""
        return self._said("uname").split()[1]

    def write_files(self, root: Path) -> dict[str, Path]:
        """The recorded files, into `root`; {name below /proc: file}, which only a mount can put there.

        /proc/device-tree cannot be made, and is found where the kernel has it itself, below /sys.
        """
        below_proc = {}
        for path in sorted((self.folder / "files").rglob("*")):
            name = path.relative_to(self.folder / "files").as_posix()
            if name.startswith("proc/device-tree/"):
                name = "sys/firmware/devicetree/base/" + name.removeprefix("proc/device-tree/")
            if not path.is_file():
                continue
            if name.startswith("proc/"):
                below_proc[name.removeprefix("proc/")] = path
                continue
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        return below_proc

    def _said(self, command: str) -> str:
        return (self.folder / "commands" / command).read_text()


def recordings() -> tuple[str, ...]:
    """The names of all recorded devices."""
    return tuple(sorted(p.name for p in FOLDER.iterdir() if (p / "files").is_dir()))


def recording(name: str) -> Recording:
    """The recorded device of that name; UsageError names those that there are."""
    if name not in recordings():
        raise UsageError(
            f"no recorded device '{name}'", where=str(FOLDER), todo=f"take one of {', '.join(recordings())}"
        )
    return Recording(name, FOLDER / name)
