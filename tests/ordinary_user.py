"""A device whose login is an ordinary user's: a real sshd of user 4321, with a root-owned part that he cannot write.

The server lives in a mount namespace of its own, in which /etc/passwd knows the user, and /mnt is the folder of the
test: a folder of root's, such as pytest's, is closed to others. It and its mounts go with its process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import absent, wait_until

UID = 4321
MOUNTED = Path("/mnt")

_START = f"""\
mount --make-rprivate / && mount --bind "$1" /mnt && mount --bind "$1/passwd" /etc/passwd || exit 75
exec setpriv --reuid {UID} --regid {UID} --clear-groups /usr/sbin/sshd -D -e -f /mnt/sshd/config
"""


@dataclass(frozen=True)
class Device:
    """`folder` is the test's, and /mnt to who logs in: /mnt/home is his, /mnt/system root's."""

    mounted: Path
    port: int

    @property
    def folder(self) -> Path:
        return self.mounted / "sshd"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"


@contextlib.contextmanager
def ordinary_user(folder: Path) -> Iterator[Device]:
    """The running device, whose files lie in `folder`."""
    if os.geteuid() != 0 or not shutil.which("setpriv") or not Path("/usr/sbin/sshd").exists():
        absent("a device of an ordinary user needs root, setpriv (util-linux) and sshd")
    for name in ("home", "sshd", "system"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\ndevice:x:{UID}:{UID}::/mnt/home:/bin/sh\n")
    for key in ("host_key", "client_key"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "sshd" / key]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    shutil.copy(folder / "sshd" / "client_key.pub", folder / "sshd" / "authorized_keys")
    for path in (folder / "home", folder / "sshd", *(folder / "sshd").iterdir()):
        os.chown(path, UID, UID)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (folder / "sshd" / "config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey /mnt/sshd/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
        "AuthorizedKeysFile /mnt/sshd/authorized_keys\nPasswordAuthentication no\nUseDNS no\n"
    )
    kind, key = (folder / "sshd" / "host_key.pub").read_text().split()[:2]
    (folder / "sshd" / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    argv = ["unshare", "--mount", "sh", "-c", _START, "sh", str(folder)]
    with open(folder / "log", "wb") as log, subprocess.Popen(argv, stderr=log, start_new_session=True) as server:
        try:
            wait_until(lambda: server.poll() is not None or b"listening" in (folder / "log").read_bytes())
            if server.poll() == 75:
                absent("mounting in a namespace of one's own needs root")
            assert server.poll() is None, (folder / "log").read_text()
            yield Device(folder, port)
        finally:
            server.terminate()
