"""Whether this machine runs aarch64 programs, by qemu-user and the kernel's binfmt_misc, and words for when it fails.

A missing or broken emulator shows itself as 'exec format error', or as status 139 of any program (case D04).
Source of the formats: Documentation/admin-guide/binfmt-misc.rst of the kernel.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgeopt.errors import DeviceError

BINFMT = Path("/proc/sys/fs/binfmt_misc")
_SEEN = 42  # the exit status of the probe
_SEGFAULT = 139  # 128 + SIGSEGV, as a shell reports it

# (first version, first version without it) -> what was seen, and where it is told
KNOWN_TO_CRASH = (
    ((5, 0), (6, 0), "5.x: programs of libc-bin end with status 139 (docker/buildx issue 314)"),
    ((8, 0), (10, 0), "8.x and 9.x: intermittent status 139, ldconfig of Ubuntu 22.04 (tonistiigi/binfmt 215, 231)"),
)


@dataclass(frozen=True)
class Emulation:
    """How aarch64 programs run here. `native`: the CPU does; else `version` of qemu-user, None where it is unknown."""

    native: bool = False
    version: str | None = None
    interpreter: str | None = None
    flags: str = ""
    problem: str | None = None
    todo: str | None = None
    warning: str | None = None

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        return "aarch64 runs natively" if self.native else f"aarch64 runs by qemu-user {self.version or '(version?)'}"

    def check(self) -> Emulation:
        """Itself; DeviceError where aarch64 programs do not run here."""
        if self.problem:
            raise DeviceError(self.problem, where="this machine", todo=self.todo)
        return self


def preflight(binfmt: Path = BINFMT, run: Callable[[list[str]], tuple[int, str]] | None = None) -> Emulation:
    """What runs aarch64 programs here, proven by running one of 132 bytes; `problem` says why none does."""
    run = run or _run
    if platform.machine() in ("aarch64", "arm64"):
        return Emulation(native=True)
    registered = _registered(binfmt)
    if registered.problem:
        return registered
    version = parse_version(run([os.path.realpath(registered.interpreter), "--version"])[1])
    found = replace(registered, version=version, warning=known_to_crash(version))
    status, said = _probe(run)
    if status != _SEEN:
        return replace(
            found,
            problem=explain(status, said, version) or f"an aarch64 program ended with status {status}: {said}",
            todo="install another version of qemu-user-static and run: update-binfmts --enable qemu-aarch64",
        )
    return found


def explain(status: int, said: str, version: str | None = None) -> str | None:
    """What a program's end says of the emulator, in one sentence; None where it says nothing of it.

    `status`: the exit status, 128 + N or -N after signal N. `said`: its stderr.
    """
    if re.search(r"exec format error", said, re.IGNORECASE) or status == -8:
        return "exec format error: the program is for another CPU, and nothing here is registered to run it"
    if status in (_SEGFAULT, -11) or "uncaught target signal 11" in said:
        known = known_to_crash(version)
        which = f"qemu-user {version}" if version else "the emulator"
        more = f"; known of {known}" if known else ""
        return f"segmentation fault (status 139) of a program run by {which}, more likely the emulator's than its{more}"
    return None


def parse_version(text: str) -> str | None:
    """'qemu-aarch64 version 7.2.22 (Debian 1:7.2+dfsg-7)' -> '7.2.22'."""
    found = re.search(r"version (\d+(?:\.\d+)+)", text or "")
    return found.group(1) if found else None


def known_to_crash(version: str | None) -> str | None:
    """What is known against this version of qemu-user; None where nothing is."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version or "")[:2])
    return next((words for low, high, words in KNOWN_TO_CRASH if numbers and low <= numbers < high), None)


def parse_entry(text: str) -> tuple[bool, str | None, str]:
    """(enabled, interpreter, flags) of an entry of binfmt_misc."""
    interpreter = re.search(r"^interpreter (.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags: ?(\S*)$", text, re.MULTILINE)
    enabled = text.split("\n", 1)[0].strip() == "enabled"
    return enabled, interpreter.group(1) if interpreter else None, flags.group(1) if flags else ""


def probe_program() -> bytes:
    """A static aarch64 program of 132 bytes: exit(42). (ELF-64: System V ABI; syscall 93: asm-generic/unistd.h)"""
    code = struct.pack("<III", 0xD2800000 | _SEEN << 5, 0xD2800000 | 93 << 5 | 8, 0xD4000001)  # mov x0; mov x8; svc 0
    base, header = 0x400000, 64 + 56
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    elf = struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, base + header, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = header + len(code)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x10000)
    return ident + elf + segment + code


def _registered(binfmt: Path) -> Emulation:
    install = "apt install qemu-user-static binfmt-support"
    mount = f"mount -t binfmt_misc binfmt_misc {BINFMT}; update-binfmts --enable qemu-aarch64"
    if not (binfmt / "status").exists():
        return Emulation(problem="the kernel's binfmt_misc is not mounted, so no aarch64 program runs", todo=mount)
    entries = sorted(p for p in binfmt.iterdir() if re.search("aarch64|arm64", p.name))
    if not entries:
        return Emulation(problem="qemu-user for aarch64 is not registered with binfmt_misc", todo=f"{install}; {mount}")
    enabled, interpreter, flags = parse_entry(entries[0].read_text())
    found = Emulation(interpreter=interpreter, flags=flags)
    if not enabled or "disabled" in (binfmt / "status").read_text():
        return replace(found, problem=f"{entries[0].name} is disabled in binfmt_misc", todo=mount)
    if "F" not in flags:
        return replace(
            found, problem=f"{entries[0].name} is registered without the flag F, so it is not found inside a chroot",
            todo=f"{install} (Debian's registers it with F)",
        )  # fmt: skip
    return found


def _probe(run: Callable[[list[str]], tuple[int, str]]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe"
        path.write_bytes(probe_program())
        path.chmod(0o755)
        return run([str(path)])


def _run(argv: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return 124, "it did not end within 60 s"
    except OSError as why:
        return 126, os.strerror(why.errno or 0)
    return done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace").strip()
