"""One command on an SSH channel: its output unframed, both streams drained as they come."""

from __future__ import annotations

import contextlib
import errno
import io
import select
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from edgeopt.errors import HostError, SpaceError, TransferError
from edgeopt.ports import shell
from edgeopt.ports.connection import Result

if TYPE_CHECKING:
    import paramiko

WINDOW_BYTES = 16 << 20  # paramiko's 2 MiB make downloads erratic
PIECE_BYTES = 32 * 1024 - 64  # what fits OpenSSH's largest packet


class Command:
    """A command on a channel of its own, its two streams drained as they come."""

    def __init__(self, channel: paramiko.Channel, name: str, sink: BinaryIO | None):
        self.name = name
        self.token = shell.new_token()
        self.to_file = sink is not None
        self._channel = channel
        self._out, self._err = shell.Frame(self.token), shell.Frame(self.token)
        self._sink = sink or io.BytesIO()
        self._complaints = io.BytesIO()
        channel.settimeout(0.05)  # how long send() waits for window before the output is looked at again

    @property
    def pid(self) -> int | None:
        """The process on the device, None before it has started."""
        return self._out.pid

    def send(self, piece: bytes) -> int:
        """Bytes of `piece` that went out; with b"" the end of input is sent. 0 while the device takes no more."""
        if not piece:
            self._channel.shutdown_write()
            return 0
        try:
            return self._channel.send(piece)
        except TimeoutError:
            return 0
        except OSError:
            if self._channel.closed:  # the command ended without reading all; its result says why
                return 0
            raise

    @contextlib.contextmanager
    def beating(self, beat_s: float | None) -> Iterator[None]:
        """A block during which a newline is sent to the command every `beat_s`; None: none is."""
        over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(Exception):  # whoever uses the link is told that it is gone
                self.send(b"\n")
                while not over.wait(beat_s):
                    self.send(b"\n")

        beater = threading.Thread(target=beat, daemon=True) if beat_s else None
        if beater is not None:
            beater.start()
        try:
            yield
        finally:
            over.set()
            if beater is not None:
                beater.join(1)

    def drain(self, wait_s: float) -> int:
        """Bytes of both streams taken in, waiting at most `wait_s` for the first of them."""
        if wait_s and self._channel.eof_received:
            # the descriptor stays readable after the end of output; only the exit status can still come
            self._channel.status_event.wait(min(wait_s, 0.05))
        elif wait_s:
            select.select([self._channel], [], [], wait_s)
        count = 0
        while self._channel.recv_ready():
            data = self._channel.recv(WINDOW_BYTES)
            self._write(self._out.feed(data))
            count += len(data)
        while self._channel.recv_stderr_ready():
            data = self._channel.recv_stderr(WINDOW_BYTES)
            self._complaints.write(self._err.feed(data))
            count += len(data)
        return count

    def _write(self, data: bytes) -> None:
        try:
            self._sink.write(data)
        except OSError as why:
            kind = SpaceError if why.errno in (errno.ENOSPC, errno.EDQUOT) else TransferError
            raise kind(f"cannot write the file here: {why.strerror}", where=str(self._sink.name)) from None

    def has_ended(self) -> bool:
        if self._out.ended and self._err.ended:
            return True
        return self._channel.closed and not self._channel.recv_ready() and not self._channel.recv_stderr_ready()

    def has_line(self) -> bool:
        return b"\n" in self._sink.getvalue()

    def first_line(self) -> str:
        return self._sink.getvalue().split(b"\n", 1)[0].decode("utf-8", "replace")

    def is_sftp(self) -> bool:
        """Whether what answers is no shell but an SFTP server: SSH_FXP_VERSION comes after the packet's length."""
        said = self._out.noise
        return len(said) >= 9 and said[:1] == b"\0" and said[4:5] == b"\2"

    def result(self, label: str) -> Result:
        """How it ended. HostError where the login shell did not run it, TransferError where the link was cut."""
        complaints = self._complaints.getvalue()
        if self._out.status is None:
            if self.is_sftp():
                raise _sftp_only(label)
            if self._channel.exit_status < 0 or self._out.started:
                raise TransferError(
                    "the connection broke before the command ended", where=label,
                    todo="repeat: a push resumes where it was",
                )  # fmt: skip
            raise _not_run(self._err.noise, self._out.noise, label)
        out = b"" if self.to_file else self._sink.getvalue()
        return Result(self._out.status, out, complaints, self._out.noise + self._err.noise)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the link may be gone already, and the channel with it
            self._channel.close()


def _not_run(err: bytes, out: bytes, label: str) -> HostError:
    """The error for a command whose login shell ended without having run it."""
    if b"allows sftp connections only" in err + out:  # internal-sftp's words
        return _sftp_only(label)
    said = "".join(c for c in (err + out).decode("utf-8", "replace") if c.isprintable() or c in "\n\t").strip()
    what = "the login shell did not run the command" + (f": {said[:500]}" if said else " and said nothing")
    return HostError(what, where=label, todo="log in by ssh and run: sh -c 'echo hello'")


def _sftp_only(label: str) -> HostError:
    return HostError(
        "the account is for SFTP only: no command runs there", where=label,
        todo="use an account with a shell, or take 'ForceCommand internal-sftp' off it in sshd_config",
    )  # fmt: skip
