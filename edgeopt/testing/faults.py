"""What can be wrong with a device, as switches of the virtual one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Faults:
    """Each is off by default. Those that a full machine (tier 2) cannot have are named in `machine_cannot`."""

    no_python: bool = False
    read_only_home: bool = False
    tmp_mb: int | None = None  # /tmp is a tmpfs of this size
    disk_mb: int | None = None  # what may be written beside /tmp, in all
    clock_offset_s: int | None = None  # of what programs on the device read as the time of day
    shell: str = "/bin/bash"  # of the user: /bin/sh, /usr/bin/fish, /bin/false
    noise: str | None = None  # what the shell's start-up file prints in every session
    sftp: bool = True
    sudo: Literal["passwordless", "password", "missing"] = "passwordless"
    tegrastats: Literal["replayed", "root", "missing"] = "replayed"
    nvpmodel: Literal["obeys", "keeps", "reboot", "missing"] = "obeys"
    sshd: tuple[str, ...] = ()  # further lines of sshd_config, which come first: "MaxSessions 1"

    def machine_cannot(self) -> list[str]:
        """The faults among those that are switched on which only tier 1 has."""
        names = ("read_only_home", "tmp_mb", "disk_mb", "clock_offset_s")
        return [name for name in names if getattr(self, name) != getattr(Faults(), name)]
