"""A candidate's own process: a library that aborts takes the child along, and the parent has an answer."""

import contextlib
import json
import os
import platform
import select
import subprocess
import sys
import time

from . import machine, processes
from .failures import Failure, of_exit

_KEPT_STDERR_BYTES = 2000
_PIPE_BYTES = 65536  # what a pipe holds (pipe(7))
# How often a child's memory is looked at, and the part of the machine's that stays free: below it a system swaps or
# kills. The kernel's own limit (RLIMIT_AS) counts addresses, of which CUDA and torch reserve far more than they use.
_LOOK_S = 0.1
_FREE_SHARE, _FREE_LEAST = 0.03, 64 << 20

# sys.path[0] would be the working directory, where any json.py would be imported in place of the library's
_START = (
    "import importlib, sys; sys.path[0] = sys.argv[1];"
    " importlib.import_module(sys.argv[2]).main(sys.argv[3], sys.argv[4])"
)


class Child:
    """One process for one candidate. `ask` sends a command and gives the last line of the answer."""

    def __init__(self, request_path, name, timeout_s, threads=None, deadline=None, memory_bytes=None):
        """`timeout_s`: the longest silence in an answer; `deadline`: perf_counter() that ends all.

        `memory_bytes`: what it may hold, None for all but a rest of the machine's.
        """
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self.deadline = deadline
        self._lines = b""
        self._stderr = b""
        package = __name__.rpartition(".")[0]
        argv = [sys.executable, "-c", _START, processes.import_root(package), package + ".child", request_path, name]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(threads),
        )
        self._open = [self._process.stdout, self._process.stderr]
        self.pid = self._process.pid

    def ask(self, command, on_line=None):
        """Send `command`; every line of the answer but the last goes to `on_line`. Raises Failure."""
        with contextlib.suppress(OSError):  # the child is gone; what it left to read says why
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        while True:
            line = json.loads(self._read_line(command))
            if "failure" in line:
                failure = line["failure"]
                raise Failure(failure["kind"], failure["message"], failure["signal"])
            if line.get("done"):
                return line
            if on_line:
                on_line(line)

    def close(self):
        """End the process at once, whatever it does. A last answer has been read by now, or never will be."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):  # an unwritten command: the child is gone
                pipe.close()

    def _read_line(self, command):
        heard = time.perf_counter()
        while b"\n" not in self._lines and self._process.stdout in self._open:
            self._read(min(_LOOK_S, self._left(heard, command)))
            self._check_memory()
        if b"\n" not in self._lines:
            status = self._status()
            self._read(0)  # its last words: a pipe holds no more than one read takes
            raise of_exit(status, self._said())
        line, _, self._lines = self._lines.partition(b"\n")
        return line.decode("utf-8")

    def _read(self, wait_s):
        """Take in what the child wrote, waiting for up to `wait_s`; stderr too, or a full pipe would stop it."""
        ready, _, _ = select.select(self._open, [], [], wait_s)
        for pipe in ready:
            data = os.read(pipe.fileno(), _PIPE_BYTES)
            if not data:
                self._open.remove(pipe)
            elif pipe is self._process.stdout:
                self._lines += data
            else:
                self._stderr = (self._stderr + data)[-_KEPT_STDERR_BYTES:]

    def _left(self, heard, command):
        """Seconds until the child was silent for too long; kills it and raises Failure when that is now."""
        now = time.perf_counter()
        left = heard + self._timeout_s - now
        if self.deadline is not None:
            left = min(left, self.deadline - now)
        if left <= 0:
            self._process.kill()
            raise Failure("timeout", "no answer to '%s' within %.0f s; the process was ended" % (command, now - heard))
        return left

    def _check_memory(self):
        """End the child where it holds more than it may, or is about to take the last of the machine's memory."""
        held = machine.resident_bytes(self.pid)
        if not held:
            return
        free, whole = machine.memory_available()
        reason = None
        if self._memory_bytes is not None and held > self._memory_bytes:
            reason = "the limit is %d MiB" % (self._memory_bytes >> 20)
        elif free is not None and free < max(_FREE_LEAST, _FREE_SHARE * whole) and held > free:
            reason = "the machine has %d MiB left" % (free >> 20)
        if reason:
            self._process.kill()
            raise Failure("memory", "it holds %d MiB and %s; the process was ended" % (held >> 20, reason))

    def _status(self):
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its pipes and lives on
            self._process.kill()
            return self._process.wait()

    def _said(self):
        lines = self._stderr.decode("utf-8", "replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-3:])


def _environment(threads):
    env = dict(os.environ)
    if threads:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            env[name] = str(threads)
    if platform.machine() == "aarch64" and sys.version_info < (3, 7):
        # JetPack 4: OpenBLAS of numpy 1.19.5 takes the Cortex-A57 for another core and executes what it lacks
        env.setdefault("OPENBLAS_CORETYPE", "ARMV8")
    return env
