"""Crashes on purpose: a device whose programs end everything at a named point, and an operator who kills himself.

The device is a real sshd whose PATH begins with shims. A shim runs the real program, unless the point that is armed
(a file) names it: then every process of this connection, its sshd included, is killed before or after the real
program has run, or with a part of its input taken. Nothing of this is known to the scripts.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

# the programs that change something, or that come between two changes
SHIMMED = ("cat", "chmod", "find", "ln", "mkdir", "mv", "openssl", "rm", "sync", "crashpoint")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
MIDDLE_BYTES = 150_000


@dataclass(frozen=True)
class Point:
    """`program` called with arguments like `pattern` (of the shell), and when it dies: before, after or in the middle.

    `switched`: current may be the new release already, unproven.
    """

    name: str
    program: str
    pattern: str
    when: str
    switched: bool = False


def _both(name: str, program: str, pattern: str, switched: bool = False) -> tuple[Point, Point]:
    return (
        Point(f"{name}:before", program, pattern, "before", switched),
        Point(f"{name}:after", program, pattern, "after", switched),
    )


# in the order in which a push with --keep 1 and an activation come to them
DEVICE_POINTS = (
    Point("lock-journal", "sync", "*/.journal", "before"),
    Point("blob-folder", "mkdir", "-p */blobs/sha256/??", "after"),
    Point("blob-arrives", "cat", "", "middle"),
    Point("blob-read-only", "chmod", "444 *.part", "after"),
    Point("blob-flush", "sync", "*.part", "after"),
    Point("blob-hash", "openssl", "dgst*", "before"),
    *_both("blob-rename", "mv", "-f *.part */blobs/sha256/*"),
    Point("staging-folder", "mkdir", "*/.staging-*", "after"),
    *_both("staging-link", "ln", "*/blobs/* */.staging-*"),
    *_both("release-rename", "mv", "-fT */.staging-* */releases/*"),
    Point("release-flush", "sync", "*/releases", "after"),
    *_both("prune-rename", "mv", "-fT */releases/* */.staging-pruned-*"),
    Point("prune-remove", "rm", "-rf */.staging-pruned-*", "before"),
    *_both("pending-rename", "mv", "-f .pending.new pending"),
    *_both("previous-rename", "mv", "-fT .previous.new previous"),
    Point("current-link", "ln", "-s releases/* .current.new", "after"),
    *_both("current-rename", "mv", "-fT .current.new current", switched=True),
    Point("links-flush", "sync", ".", "after", switched=True),
    Point("after_activate", "crashpoint", "after_activate", "before", switched=True),
    Point("health", "crashpoint", "health", "before", switched=True),
    Point("settle:before", "rm", "-f */pending", "before", switched=True),
    Point("settle:after", "rm", "-f */pending", "after", switched=True),
)

_SHIM = """\
#!/bin/sh
if [ -f "{armed}" ]; then
  {{ read -r program when; read -r pattern; }} < "{armed}"
  if [ "$program" = {program} ]; then
    case $* in
      $pattern)
        case $when in
          before) exec "{python}" "{die}" ;;
          after) {real} "$@"; exec "{python}" "{die}" ;;
          middle) "{python}" "{die}" {middle}; exit ;;
        esac ;;
    esac
  fi
fi
exec {real} "$@"
"""

_DIE = """\
import os, signal, sys
if len(sys.argv) > 1:  # a part of stdin goes through before
    left = int(sys.argv[1])
    while left > 0:
        data = os.read(0, min(left, 65536))
        if not data:  # too little to die in the middle of it
            sys.exit(0)
        os.write(1, data)
        left -= len(data)
os.rename({armed!r}, {taken!r})
mine = b"SSH_CONNECTION=" + os.environb[b"SSH_CONNECTION"]
ours, parents = set(), set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if mine in open("/proc/%s/environ" % pid, "rb").read().split(b"\\0"):
            ours.add(int(pid))
            parents.add(int(open("/proc/%s/stat" % pid).read().rpartition(")")[2].split()[1]))
    except OSError:
        pass
sshds = {{pid for pid in parents - ours if pid > 1 and "sshd" in open("/proc/%d/comm" % pid).read()}}
# all at once: nobody may see that another has gone
for number in (signal.SIGSTOP, signal.SIGKILL):
    for pid in (sshds | ours) - {{os.getpid()}}:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
os.kill(os.getpid(), signal.SIGKILL)
"""


class Device:
    """The shims in `folder`; `settings` is the line for sshd_config."""

    def __init__(self, folder: Path):
        self._armed, self._taken = folder / "armed", folder / "taken"
        programs = folder / "bin"
        programs.mkdir(parents=True)
        die = folder / "die.py"
        die.write_text(_DIE.format(armed=str(self._armed), taken=str(self._taken)))
        for program in SHIMMED:
            real = shutil.which(program, path=SYSTEM_PATH) or "/bin/true"
            text = _SHIM.format(
                armed=self._armed, program=program, python=sys.executable, die=die, real=real, middle=MIDDLE_BYTES
            )
            (programs / program).write_text(text)
            (programs / program).chmod(0o755)
        # a second SetEnv line does not count, and a home with a .bashrc would be read at every command
        self.settings = f'SetEnv PATH="{programs}:{SYSTEM_PATH}" HOME="{folder}"'

    def arm(self, point: Point) -> None:
        self._taken.unlink(missing_ok=True)
        self._armed.write_text(f"{point.program} {point.when}\n{point.pattern}\n")

    def was_taken(self) -> bool:
        """Whether somebody died there; what is armed is disarmed."""
        self._armed.unlink(missing_ok=True)
        return self._taken.exists()


# (step, when): the operator kills himself there; what a step is see crash_operator
OPERATOR_POINTS = (
    ("lock", "after"),
    ("state", "after"),
    ("survey", "after"),
    ("receive", "middle"),
    ("receive", "after"),
    ("stage", "before"),
    ("stage", "after"),
    ("prune", "after"),
    ("switch", "before"),
    ("switch", "after"),
    ("after_activate", "after"),
    ("health", "after"),
    ("settle", "after"),
)


def die() -> None:
    """End this process as SIGKILL does."""
    os.kill(os.getpid(), signal.SIGKILL)
