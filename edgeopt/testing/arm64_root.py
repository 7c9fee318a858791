"""The arm64 root file system of the virtual device: Debian's packages, unpacked without running any of their scripts.

Bullseye has glibc 2.31 and Python 3.9, the nearest that Debian has to JetPack 5 (glibc 2.31, Python 3.8).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from edgeopt.digest import of_value
from edgeopt.errors import HostError
from edgeopt.progress import log

SUITE = "bullseye"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = (
    "base-files", "base-passwd", "bash", "dash", "coreutils", "util-linux", "findutils", "grep", "sed", "mawk", "tar",
    "gzip", "hostname", "procps", "libc-bin", "busybox-static", "fish", "libfaketime", "openssh-server",
    "openssh-client", "python3", "python3-distutils", "libgomp1", "libstdc++6", "kmod",
)  # fmt: skip
_NOT_NEEDED = (
    "doc",
    "man",
    "locale",
    "info",
    "fish/completions",
    "fish/man",
    "fish/tools",
    "bash-completion",
    "lintian",
)
_VERSION = 1  # of what is done to the root after the packages are unpacked

USERS = """\
nvidia:x:1000:1000:NVIDIA,,,:/home/nvidia:/bin/bash
sshd:x:110:65534::/run/sshd:/usr/sbin/nologin
"""
GROUPS = "nvidia:x:1000:\n"


def default_cache() -> Path:
    """Where roots, wheels and kernels are kept: `edgeopt/virtual-device` below the user's cache folder (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "edgeopt" / "virtual-device"


def arm64_root(cache: Path, *, mirror: str = MIRROR) -> Path:
    """The cached root, built first where it is not there (some 20 s, 40 MB over the network).

    It is never written to: devices lay a layer of their own over it. Raises HostError where it cannot be built.
    """
    key = of_value({"suite": SUITE, "packages": PACKAGES, "users": USERS, "version": _VERSION})
    return cached(cache / "roots" / key[:16], lambda folder: _build(folder, mirror))


def cached(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, made by `build(folder)` and renamed once it is whole; of several processes one builds and all wait."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_name(path.name + ".lock")):
        if not path.exists():
            for left in path.parent.glob(f"{path.name}.part-*"):  # of a build that was cut
                shutil.rmtree(left, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=f"{path.name}.part-", dir=path.parent))
            part.chmod(0o755)
            try:
                build(part)
                os.rename(part, path)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    return path


def run(argv: list[str], what: str, *, todo: str, **how) -> subprocess.CompletedProcess:
    """Run a command of the build; HostError with its last lines where it fails or is not here."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, **how)
    except FileNotFoundError:
        raise HostError(
            f"{argv[0]} is not installed, so {what} cannot be made", where="this machine", todo=todo
        ) from None
    if done.returncode:
        said = " / ".join((done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()[-3:])
        raise HostError(f"{what} cannot be made: {argv[0]} says: {said}", where="this machine", todo=todo)
    return done


def _build(folder: Path, mirror: str) -> None:
    if os.geteuid() != 0:
        raise HostError("the arm64 root is built by root only", where="this machine", todo="run it as root")
    log.info("building an arm64 root of Debian %s from %s", SUITE, mirror)
    argv = [
        "mmdebstrap", "--quiet", "--mode=root", "--arch=arm64", "--variant=extract",
        f"--include={','.join(PACKAGES)}", SUITE, str(folder), mirror,
    ]  # fmt: skip
    run(argv, "the arm64 root", todo="apt install mmdebstrap, and see that the mirror can be reached")
    _finish(folder)


def _finish(root: Path) -> None:
    """What the packages' scripts would have done, as far as a device needs it."""
    share = root / "usr/share"
    for name in _NOT_NEEDED:
        shutil.rmtree(share / name, ignore_errors=True)
    for name, more in (("passwd", USERS), ("group", GROUPS)):
        text = (share / f"base-passwd/{name}.master").read_text()
        (root / "etc" / name).write_text(text.replace("root:*:", "root:x:") + more)
    names = [line.split(":")[0] for line in (root / "etc/passwd").read_text().splitlines()]
    (root / "etc/shadow").write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in names))
    (root / "etc/shadow").chmod(0o640)
    for name in ("proc", "sys", "run/sshd", "dev/pts", "dev/shm", "home/nvidia", "root", "mnt", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "var/tmp").chmod(0o1777)
    os.chown(root / "home/nvidia", 1000, 1000)
    awk = root / "usr/bin/awk"
    if not awk.exists():
        awk.symlink_to("mawk")
    (root / "etc/resolv.conf").write_text("")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    run(["ldconfig", "-r", str(root)], "the arm64 root", todo="apt install libc-bin")


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
