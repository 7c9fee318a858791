"""Processes that outlive who started them, and files that are written whole.

A pid may be given to another process once its own has ended, and all pids begin anew at boot: a process is known by
its pid, the time at which it started (proc(5), field 22 of stat) and the kernel's boot id.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START = "import importlib, sys; sys.path[0] = sys.argv[1]; importlib.import_module(sys.argv[2]).main(sys.argv[3:])"


def this_process():
    """{"pid", "started", "boot"} of this process."""
    return {"pid": os.getpid(), "started": _started(os.getpid()), "boot": _boot()}


def is_alive(process):
    """Whether the very process that `this_process` described still runs."""
    return bool(process) and process["boot"] == _boot() and _started(process["pid"]) == process["started"] is not None


def detach(module, argv):
    """Run `main(argv)` of a module of this package in a session of its own, which outlives terminal and connection."""
    package = __name__.rpartition(".")[0]
    command = [sys.executable, "-c", _START, import_root(package), package + "." + module] + argv
    with open(os.devnull, "r+b") as nothing:
        subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, close_fds=True, cwd="/"
        )  # fmt: skip


def die_with_parent():
    """Have the kernel end this process with its parent."""
    with contextlib.suppress(OSError, AttributeError):  # a libc without it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def write_json(path, value):
    """Replace the file `path`: a reader sees the old value or the new one."""
    part = "%s.%d.part" % (path, os.getpid())
    with open(part, "w", encoding="utf-8") as f:
        json.dump(value, f, sort_keys=True)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def read_json(path):
    """The value in the file `path`; None where there is no such file, or it is cut off."""
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def _started(pid):
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()  # the name before it may hold blanks
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _boot():
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as f:
            return f.read().strip()
    except OSError:
        return ""


def import_root(package):
    """The folder or the zip file that `package` is imported from."""
    path = os.path.dirname(os.path.abspath(sys.modules[package].__file__))
    for _ in package.split("."):
        path = os.path.dirname(path)
    return path
