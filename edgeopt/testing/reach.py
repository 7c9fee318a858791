"""How a virtual device is reached: throwaway keys, a free port on loopback, an ssh_config with its alias."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def make_keys(folder: Path) -> None:
    """`host_key` and `client_key` in `folder`, where they are not there yet."""
    for name in ("host_key", "client_key"):
        if not (folder / name).exists():
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "virtual-device", "-f", str(folder / name)]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def allow(folder: Path, keys: Path) -> None:
    """Have the client key of `folder` be the one that `keys`, an AuthorizedKeysFile, lets in."""
    keys.parent.mkdir(parents=True, exist_ok=True)
    keys.write_bytes((folder / "client_key.pub").read_bytes())
    keys.chmod(0o644)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_client_config(folder: Path, port: int, alias: str) -> Path:
    """`ssh_config` with the alias and `known_hosts` with the device's key, in `folder`."""
    kind, key = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    lines = [
        f"Host {alias}",
        "  HostName 127.0.0.1",
        f"  Port {port}",
        "  User nvidia",
        f'  IdentityFile "{folder}/client_key"',
        "  IdentitiesOnly yes",
        f'  UserKnownHostsFile "{folder}/known_hosts"',
        "  GlobalKnownHostsFile none",
    ]
    path = folder / "ssh_config"
    path.write_text("\n".join(lines) + "\n")
    return path


def answers(port: int, *, within_s: float, alive: Callable[[], bool]) -> bool:
    """True as soon as an SSH server greets there; False when the time is over or `alive()` is not so any more."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and alive():
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
                s.settimeout(5)
                if s.recv(4) == b"SSH-":
                    return True
        except OSError:
            pass
        time.sleep(0.05)
    return False
