"""This machine as the device: commands in processes of their own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from edgeopt.errors import DeviceError
from edgeopt.ports.connection import CommandEnded, Connection, Result, checked
from edgeopt.progress import Advance

LABEL = "this machine"


class LocalConnection(Connection):
    """Commands on this machine, each in a session of its own so that a timeout ends it and its children."""

    label = LABEL
    remote = False

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | BinaryIO = b"",
        stdout: BinaryIO | None = None,
        timeout_s: float = 60,
        check: bool = True,
        advance: Advance | None = None,
    ) -> Result:
        source = subprocess.PIPE if isinstance(stdin, bytes) else stdin
        before = 0 if isinstance(stdin, bytes) else stdin.tell()
        child = _start(argv, source, subprocess.PIPE if stdout is None else stdout)
        try:
            given = stdin if isinstance(stdin, bytes) else None
            out, err = child.communicate(given, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"{argv[0]} did not finish within {timeout_s:g} s and was stopped", where=self.label,
                todo="see what it waits for, or allow it more time",
            ) from None  # fmt: skip
        finally:
            _stop(child)
        if advance is not None:
            advance(_moved(stdin, before) if stdout is None else stdout.tell())
        done = Result(_status(child.returncode), out or b"", err or b"")
        return checked(done, argv, label=self.label) if check else done

    @contextlib.contextmanager
    def hold(self, argv: Sequence[str], *, timeout_s: float = 30, beat_s: float | None = None) -> Iterator[str]:
        # stderr to a file: nobody reads it while the command is held, and a full pipe would stop it
        with tempfile.TemporaryFile() as complaints:
            child = _start(argv, subprocess.PIPE, subprocess.PIPE, complaints)
            try:
                line = _first_line(child, timeout_s)
                if not line.endswith(b"\n"):
                    self._end(child, argv, timeout_s, stdin=False)
                    complaints.seek(0)
                    raise CommandEnded(Result(_status(child.returncode), line, complaints.read()))
                try:
                    yield line.decode("utf-8", "replace").rstrip("\n")
                except BaseException:
                    with contextlib.suppress(DeviceError):
                        self._end(child, argv, timeout_s)
                    raise
                self._end(child, argv, timeout_s)
            finally:
                _stop(child)

    def _end(self, child: subprocess.Popen, argv: Sequence[str], timeout_s: float, stdin: bool = True) -> None:
        """Close stdin and wait for the end: what the command held must be free when its block is left."""
        if stdin:
            child.stdin.close()
        try:
            child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"{argv[0]} did not end within {timeout_s:g} s", where=self.label) from None

    def reach(self) -> None:
        """This machine is there."""

    def close(self) -> None:
        """Nothing is held between commands."""


def _start(argv, stdin, stdout, stderr=subprocess.PIPE) -> subprocess.Popen:
    try:
        return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
    except OSError as why:
        raise DeviceError(
            f"cannot run {argv[0]}: {why.strerror}", where=LABEL, todo="install it, or put it on the PATH"
        ) from None


def _stop(child: subprocess.Popen) -> None:
    """End the child and its children where they still run, and close the pipes."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _first_line(child: subprocess.Popen, timeout_s: float) -> bytes:
    """What the child wrote up to its first newline, or up to its end or the deadline."""
    line = b""
    deadline = time.monotonic() + timeout_s
    fd = child.stdout.fileno()
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0, deadline - time.monotonic()))
        byte = os.read(fd, 1) if ready else b""
        if not byte:
            break
        line += byte
    return line


def _moved(stdin: bytes | BinaryIO, before: int) -> int:
    return len(stdin) if isinstance(stdin, bytes) else stdin.tell() - before


def _status(returncode: int) -> int:
    """As a shell reports it: 128 + N after signal N."""
    return returncode if returncode >= 0 else 128 - returncode
