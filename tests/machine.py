"""A device of its own on this machine: sshd and a user in mount and process namespaces, with what is odd about it.

Nothing outside of the namespaces changes, and all of it goes with their first process. Needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import absent, wait_until

USER = "device"
UID = 4242
HOME = Path("/home/device")  # inside; outside it is `Machine.home`
PLAIN_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

# $1 the machine's folder, $2 the sshd. /run and /home are the machine's own; MOUNTS are the oddities.
_SETUP = """\
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/machine /run/sshd
mount --bind "$1" /run/machine
mount -t tmpfs -o mode=755 tmpfs /home
mkdir -p /home/device
mount --bind /run/machine/home /home/device
for file in passwd group shadow; do mount --bind /run/machine/$file /etc/$file; done
MOUNTS
exec "$2" -D -f /run/machine/sshd_config -E /run/machine/sshd.log
"""


def require_root() -> None:
    """Skip the test where namespaces cannot be made."""
    if os.geteuid() != 0:
        absent("namespaces and mounts need root")
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    if done.returncode != 0:
        absent(f"no namespace can be made: {done.stderr.strip()}")


@dataclass
class Machine:
    """The device that lies in `folder`; `up` starts it. `mounts` are shell lines, run inside before sshd starts."""

    folder: Path
    sshd: str
    address: str = "127.0.0.1"
    shell: str = "/bin/bash"
    uid: int = UID
    home_path: str = str(HOME)
    settings: tuple[str, ...] = ()
    mounts: str = ""
    path: str = PLAIN_PATH
    environment: tuple[str, ...] = ()
    sftp: str | None = "internal-sftp"
    net: str | None = None  # the network namespace to run in
    port: int = 0
    _child: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def up(self) -> Machine:
        """Start it, once more after a `power_cut` too."""
        if not self.home.exists():
            self._furnish()
        for _ in range(5):  # somebody may take the port between our look and sshd's
            self.port = self.port or _free_port()
            self._write_configs()
            log = self.folder / "sshd.log"
            log.unlink(missing_ok=True)
            argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
            argv += ["sh", "-c", _SETUP.replace("MOUNTS", self.mounts), "sh", str(self.folder), self.sshd]
            if self.net:
                argv = ["nsenter", f"--net=/run/netns/{self.net}", "--", *argv]
            with open(self.folder / "setup.log", "wb") as said:
                self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            if wait_until(lambda log=log: self._child.poll() is not None or _listens(log)) and _listens(log):
                return self
            self.power_cut()
            self.port = 0
        raise AssertionError(f"the machine does not start: {(self.folder / 'setup.log').read_text()}")

    def power_cut(self) -> None:
        """End every process on it at once; what lies in its home stays."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    down = power_cut

    def processes(self) -> list[int]:
        """The processes on it, sshd's sessions and their commands, without the first sshd."""
        first = _children(self._child.pid)
        found, new = [], first
        while new:
            new = [child for pid in new for child in _children(pid)]
            found += new
        return found

    def freeze(self) -> None:
        """Stop all of its sessions, as a device that is out of breath."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGCONT)

    def _furnish(self) -> None:
        self.home.mkdir(parents=True)
        os.chmod(self.folder, 0o755)
        for key in ("host_key", "client_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "machine", "-f", str(self.folder / key)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copyfile(self.folder / "client_key.pub", self.folder / "authorized_keys")
        os.chown(self.home, self.uid, self.uid)
        entry = f"{USER}:x:{self.uid}:{self.uid}::{self.home_path}:{self.shell}\n"
        own = {"passwd": entry, "group": f"{USER}:x:{self.uid}:\n", "shadow": f"{USER}:*:19000:0:99999:7:::\n"}
        for name, line in own.items():
            there = Path("/etc", name).read_text()
            (self.folder / name).write_text(line + there)
        os.chmod(self.folder / "shadow", 0o640)

    def _write_configs(self) -> None:
        variables = " ".join(f'"{entry}"' for entry in (f"PATH={self.path}", *self.environment))
        lines = [
            *self.settings,
            f"ListenAddress {self.address}",
            f"Port {self.port}",
            "HostKey /run/machine/host_key",
            "PidFile none",
            "AuthorizedKeysFile /run/machine/authorized_keys",
            f"SetEnv {variables}",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "UseDNS no",
            "PermitRootLogin yes",
            *([f"Subsystem sftp {self.sftp}"] if self.sftp else []),
        ]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        kind, blob, *_ = (self.folder / "host_key.pub").read_text().split()
        self.known_hosts.write_text(f"[{self.address}]:{self.port} {kind} {blob}\n")

    def config(self, **options) -> Path:
        """An ssh_config whose host `device` is this machine."""
        lines = {
            "HostName": self.address,
            "Port": self.port,
            "User": USER,
            "HostKeyAlias": f"[{self.address}]:{self.port}",
            "IdentityFile": self.folder / "client_key",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "none",
            **options,
        }
        path = self.folder / f"ssh_config-{secrets.token_hex(4)}"
        path.write_text("Host device\n" + "".join(f"  {key} {value}\n" for key, value in lines.items()))
        return path


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _listens(log: Path) -> bool:
    return log.exists() and "Server listening on" in log.read_text()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def programs(folder: Path, *names: str) -> Path:
    """A folder of links to what is called so here: all that a device has, where it is on its PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = shutil.which(name, path=PLAIN_PATH)
        assert found, f"{name} is not on this machine"
        (folder / name).symlink_to(found)
    return folder
