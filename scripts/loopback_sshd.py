#!/usr/bin/env python3
"""An OpenSSH server on 127.0.0.1 with throwaway keys: a device on this machine, for the demo and the tests.

    python scripts/loopback_sshd.py up DIR      # prints the command to log in; exit 3 where sshd is not installed
    python scripts/loopback_sshd.py down DIR

Runs as an ordinary user. All it writes lies in DIR: keys, `ssh_config` with the alias `edgeopt-demo`,
`known_hosts`, the log, the pid file, and `home`, which is the home directory of who logs in.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ALIAS = "edgeopt-demo"
NOT_INSTALLED = 3


class SshdError(Exception):
    """The server could not be started; the message says why."""


@dataclass(frozen=True)
class Sshd:
    """A running server: `ssh -F config edgeopt-demo` reaches it."""

    folder: Path
    port: int
    pid: int

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def home(self) -> Path:
        return self.folder / "home"


def find_sshd() -> str | None:
    """The path of sshd, which is seldom on an ordinary user's PATH; None where it is not installed."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")


def up(folder: Path, *, settings: tuple[str, ...] = ()) -> Sshd:
    """Start a server whose files lie in `folder`; `settings` are further lines of sshd_config, which come first.

    A server of this folder that still runs is stopped before. SshdError where it does not start.
    """
    program = find_sshd()
    if program is None or shutil.which("ssh-keygen") is None:
        raise SshdError("sshd is not installed (Debian: apt install openssh-server)")
    folder = folder.resolve()
    down(folder)
    (folder / "home").mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd as root insists on it
    for key in ("host_key", "client_key"):
        _make_key(folder / key)
    shutil.copyfile(folder / "client_key.pub", folder / "authorized_keys")
    for _ in range(5):  # somebody may take the port between our look and sshd's
        port = _free_port()
        _write_configs(folder, port, settings)
        pid = _start(program, folder, port)
        if pid is not None:
            return Sshd(folder, port, pid)
    raise SshdError(f"sshd does not start, see {folder / 'sshd.log'}")


def down(folder: Path) -> bool:
    """Stop the server of `folder` by its pid file; True when one was running."""
    pid_file = folder / "sshd.pid"
    try:
        pid = int(pid_file.read_text())
        command = Path(f"/proc/{pid}/cmdline")
        # a pid may have been given to another process since a crash
        if command.exists() and str(folder.resolve()).encode() not in command.read_bytes():
            raise ProcessLookupError
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        pid_file.unlink(missing_ok=True)
        return False
    deadline = time.monotonic() + 5
    while pid_file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    pid_file.unlink(missing_ok=True)
    return True


def _make_key(path: Path) -> None:
    if not path.exists():
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "edgeopt-loopback", "-f", str(path)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _write_configs(folder: Path, port: int, settings: tuple[str, ...]) -> None:
    server = [
        *settings,
        "ListenAddress 127.0.0.1",
        f"Port {port}",
        f'HostKey "{folder}/host_key"',
        f'PidFile "{folder}/sshd.pid"',
        f'AuthorizedKeysFile "{folder}/authorized_keys"',
        f'SetEnv HOME="{folder}/home"',
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "UseDNS no",
        "Subsystem sftp internal-sftp",
    ]
    client = [
        f"Host {ALIAS}",
        "  HostName 127.0.0.1",
        f"  Port {port}",
        f'  IdentityFile "{folder}/client_key"',
        "  IdentitiesOnly yes",
        f'  UserKnownHostsFile "{folder}/known_hosts"',
    ]
    host_key = (folder / "host_key.pub").read_text().split()
    (folder / "sshd_config").write_text("\n".join(server) + "\n")
    (folder / "ssh_config").write_text("\n".join(client) + "\n")
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key[0]} {host_key[1]}\n")


def _start(program: str, folder: Path, port: int) -> int | None:
    """The pid of the server when it answers on `port`, None when it does not."""
    command = [program, "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as s:
                if s.recv(4) == b"SSH-" and (folder / "sshd.pid").exists():
                    return int((folder / "sshd.pid").read_text())
        except OSError:
            pass
        time.sleep(0.02)
    return None


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in ("up", "down"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(argv[1])
    if argv[0] == "down":
        print("stopped" if down(folder) else "was not running")
        return 0
    try:
        sshd = up(folder)
    except SshdError as why:
        print(f"error: {why}", file=sys.stderr)
        return NOT_INSTALLED if find_sshd() is None else 1
    print(f"ssh -F {sshd.config} {ALIAS}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
