"""Tier 1: a native sshd whose sessions are chrooted into the arm64 root, in namespaces of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeopt.errors import HostError
from edgeopt.testing import reach

ROOT = "/mnt"  # sshd wants a path that nobody but root can write to, so not one below /tmp
HOME = "home/nvidia"
KEYS = "etc/ssh/virtual_device_keys"  # on the device: sshd reads it as its user, for whom our own folders may be shut
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FAKETIME = "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1"


@dataclass(frozen=True)
class Spec:
    """What inside.py is told; paths are the host's except `removed`, `home` and the names of `proc`."""

    root: str
    layers: tuple[str, ...]  # the first is the uppermost
    upper: str
    work: str
    hostname: str
    home: str
    proc: dict[str, str]
    removed: tuple[str, ...]
    read_only_home: bool
    tmp_mb: int | None
    disk_mb: int | None
    sshd: tuple[str, ...]
    until_stdin_ends: bool


class Namespace:
    """The processes of one device of tier 1. `stop` ends them all, by the id of the first; so does our own end."""

    def __init__(self, folder: Path, port: int):
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen | None = None

    def start(self, spec: Spec) -> None:
        """Start it and wait until sshd answers; HostError with the log where it does not."""
        path = self.folder / "spec.json"
        path.write_text(json.dumps(asdict(spec)))
        log = self.folder / "device.log"
        argv = [
            "unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child",
            sys.executable, "-I", str(Path(__file__).with_name("inside.py")), str(path),
        ]  # fmt: skip
        with open(log, "ab") as out:
            stdin = subprocess.PIPE if spec.until_stdin_ends else subprocess.DEVNULL
            self._process = subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=out, start_new_session=True)
        if not reach.answers(self.port, within_s=60, alive=lambda: self._process.poll() is None):
            self.stop()
            said = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise HostError(
                f"the virtual device does not start: {' / '.join(said) or 'sshd does not answer'}", where=str(log),
                todo="see the log; it needs root, mount and overlayfs",
            )  # fmt: skip

    @property
    def pid(self) -> int | None:
        """Of `unshare`, whose end is the end of all; None where it is not running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def stop(self) -> None:
        """End every process of the device and wait for it. Twice does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        if process.poll() is None:
            process.kill()
            process.wait(timeout=10)

    def processes(self) -> list[int]:
        """The host's ids of all that runs on the device, its first process included."""
        first = self.first
        mine = os.readlink(f"/proc/{first}/ns/pid")
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == mine:
                    found.append(int(name))
        return sorted(found)

    @property
    def first(self) -> int:
        """The host's id of the device's process 1."""
        return first_child(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to all that runs on the device but its first process."""
        first = self.first
        for pid in self.processes():
            if pid != first:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def first_child(pid: int | None) -> int:
    """The only child of `unshare`; ProcessLookupError where it is gone."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if pid else []
    if not children:
        raise ProcessLookupError("the virtual device is not running")
    return int(children[0])


def end_detached(pid: int, folder: Path) -> bool:
    """End a device that another process started, by the id that it noted; False where that is another process now."""
    with contextlib.suppress(OSError):
        if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)  # unshare takes its child along
            deadline = time.monotonic() + 10
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            return True
    return False


def write_sshd_config(
    folder: Path, port: int, *, kernel: str, settings: tuple[str, ...], sftp: bool, clock: int | None
):
    """The configuration, in `folder`/sshd_config; returns the argv that serves it."""
    names = {"QEMU_UNAME": kernel, "PATH": PATH}
    if clock is not None:
        names |= {"LD_PRELOAD": _FAKETIME, "FAKETIME": f"{clock:+d}s"}
    lines = [
        *settings,
        "ListenAddress 127.0.0.1",
        f"Port {port}",
        f'HostKey "{folder}/host_key"',
        f'PidFile "{folder}/sshd.pid"',
        f"AuthorizedKeysFile {ROOT}/{KEYS}",
        f"ChrootDirectory {ROOT}",
        "SetEnv " + " ".join(f'"{name}={value}"' for name, value in names.items()),
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "UseDNS no",
        "PrintMotd no",
        *(["Subsystem sftp internal-sftp"] if sftp else []),
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{PATH}")
    return (program, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log"))
