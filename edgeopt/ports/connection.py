"""A Connection: commands and files on a device, whether it is reached over SSH or is this machine.

Everything is built on one primitive, a command with streams, so a device needs a POSIX sh and no SFTP server.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from edgeopt.errors import DeviceError, EdgeoptError, SpaceError, TransferError, UsageError
from edgeopt.progress import Advance

# A transfer that moves less than this a second, hash and flush on the device included, is given up.
SLOWEST_BYTES_PER_S = 1 << 20

_FULL = re.compile(r"no space left|quota exceeded|file system is full", re.IGNORECASE)
_NOT_OURS = re.compile(r"read-only file system|permission denied|operation not permitted", re.IGNORECASE)
_NO_SUDO = re.compile(r"sudo: .*(password|terminal|tty)", re.IGNORECASE)

# $1 the path, $2 its size in bytes. A link that is cut looks like the end of input, hence the count, and takes the
# reader of stderr with it, hence the trap.
_PUT = """\
trap "" PIPE
LC_ALL=C; export LC_ALL
[ ! -d "$1" ] || { echo "a directory is in the way" >&2; exit 1; }
cat > "$1.part" &&
  { [ "$(wc -c < "$1.part")" -eq "$2" ] || { echo "only a part arrived" >&2; false; }; } &&
  { sync "$1.part" 2>/dev/null || sync; } &&
  mv -f "$1.part" "$1" || { rm -f "$1.part"; exit 1; }
"""

_GET = """\
LC_ALL=C; export LC_ALL
[ ! -d "$1" ] || { echo "it is a directory" >&2; exit 1; }
cat < "$1"
"""


# $1 a user's name, letters and digits only, or nothing for our own
_HOME_OF = """\
[ -n "$1" ] || { printf %s "${HOME%/}"; exit; }
eval "home=~$1"
[ "$home" != "~$1" ] && printf %s "${home%/}"
"""


@dataclass(frozen=True)
class Result:
    """How a command ended: exit status (128 + N after signal N) and what it wrote.

    `noise` is what the device's login shell printed before the command ran; no part of the output.
    """

    status: int
    stdout: bytes
    stderr: bytes
    noise: bytes = b""

    @property
    def text(self) -> str:
        """stdout as text, without white space around it."""
        return self.stdout.decode("utf-8", "replace").strip()

    @property
    def complaint(self) -> str:
        """The last line of stderr, or of stdout where stderr is empty: what the command has to say of its failure."""
        lines = (self.stderr.strip() or self.stdout.strip()).decode("utf-8", "replace").splitlines()
        return lines[-1].strip()[:500] if lines else f"exit status {self.status}"


class CommandEnded(Exception):
    """A command that was to be held open ended before it said that it is ready."""

    def __init__(self, result: Result):
        super().__init__(result.complaint)
        self.result = result


class Connection(abc.ABC):
    """A device to run commands on. Constructing one does no I/O; use it in a `with` block.

    `label` names the device for people: "user@host:port", or "this machine".
    """

    label: str
    remote = True  # whether bytes cross a network on their way
    silence_s: float = 15  # how long the other side may say nothing before it is asked for a sign of life

    @abc.abstractmethod
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
        """Run `argv` on the device and wait for it.

        `stdin` is bytes, or an unbuffered file read from where it stands. With `stdout` a file, the output goes
        there instead of into the Result. `timeout_s` counts from the start, and over SSH again from each byte of
        such a file that moved. `advance` is called with the number of bytes that moved.
        Raises DeviceError when `check` and the status is not 0, or when the command outlasts `timeout_s`;
        HostError where the device cannot be reached or falls silent; TransferError where the connection breaks.
        """

    @abc.abstractmethod
    def hold(
        self, argv: Sequence[str], *, timeout_s: float = 30, beat_s: float | None = None
    ) -> contextlib.AbstractContextManager[str]:
        """Run `argv` for the time of a `with` block: entered with its first line, ended by the end of its stdin.

        Over a network a newline is sent every `beat_s`, so that the command can tell when we are gone. It ends with
        the connection too. Raises CommandEnded where it ends before it prints a line.
        """

    @abc.abstractmethod
    def reach(self) -> None:
        """Connect now and not at the first command; from another thread, while there is something else to do."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the device. Closing twice does nothing."""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def put(self, local: Path, remote: str, *, advance: Advance | None = None) -> None:
        """Copy the file `local` to `remote`: written to `remote`.part, flushed to disk, renamed.

        `remote` never holds a partial file. SpaceError where the device's disk is full, TransferError that names
        the path and the cause otherwise.
        """
        remote = self.expand(remote)
        with open(local, "rb", buffering=0) as source:
            size = os.fstat(source.fileno()).st_size
            argv = script(_PUT, remote, str(size))
            done = self.run(argv, stdin=source, timeout_s=patience_s(size), check=False, advance=advance)
        if done.status != 0:
            raise transfer_error(done, "cannot write", where=f"{self.label}:{remote}")

    def get(
        self, remote: str, local: Path, *, advance: Advance | None = None, at_most: int | None = None
    ) -> None:  # fmt: skip
        """Copy the file `remote` to `local`, through `local`.part. TransferError names the path and the cause.

        A device that sends more than `at_most` bytes is one of them.
        """
        remote = self.expand(remote)
        part = local.with_name(local.name + ".part")
        try:
            with open(part, "wb") as file:
                sink = file if at_most is None else _Bounded(file, at_most, f"{self.label}:{remote}")
                done = self.run(script(_GET, remote), stdout=sink, timeout_s=600, check=False, advance=advance)
            if done.status != 0:
                raise transfer_error(done, "cannot read", where=f"{self.label}:{remote}")
            os.replace(part, local)
        finally:
            part.unlink(missing_ok=True)

    def expand(self, path: str) -> str:
        """`path` with a leading `~` or `~user` replaced by that home directory on the device.

        A path that begins with a dash gets a `./`, so that no program takes it for an option. UsageError for an empty
        path or one with a zero byte, DeviceError where there is no such user.
        """
        if not path or "\0" in path:
            raise UsageError("a path is empty or holds a zero byte", where=self.label, todo="name a file")
        user = re.match(r"~([A-Za-z0-9_][A-Za-z0-9._-]*)?(?=/|$)", path)
        if user is None:
            return f"./{path}" if path.startswith("-") else path
        home = self.run(script(_HOME_OF, user[1] or ""), check=False)
        if home.status != 0:
            raise DeviceError(
                f"there is no user '{user[1]}'", where=self.label, todo="write ./~NAME for a file that is called so"
            )
        return home.stdout.decode("utf-8", "surrogateescape") + path[user.end() :]


class _Bounded:
    """A file that takes `most` bytes. Its descriptor is for a command on this machine, which we trust as ourselves."""

    def __init__(self, file: BinaryIO, most: int, where: str):
        self._file, self._left, self._where = file, most, where
        self.fileno, self.tell = file.fileno, file.tell

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise TransferError(
                "the device sends more than was asked for", where=self._where, todo="see what runs on that device"
            )
        return self._file.write(data)


def script(text: str, *args: str) -> list[str]:
    """The argv that runs a POSIX sh script with `args` as $1, $2 ..."""
    return ["sh", "-c", text, "sh", *args]


def patience_s(size: int) -> float:
    """Seconds to wait for something to happen to `size` bytes on the device."""
    return 60 + size / SLOWEST_BYTES_PER_S


def transfer_error(done: Result, what: str, *, where: str) -> EdgeoptError:
    """The error for a command that should have written or read a file and failed."""
    if _FULL.search(done.stderr.decode("utf-8", "replace")):
        return SpaceError("the device's disk is full", where=where, todo="free space there, or choose another --root")
    complaint = done.stderr.decode("utf-8", "replace")
    todo = "choose a folder that you may write to, with --root" if _NOT_OURS.search(complaint) else None
    todo = todo or "see what is at that path on the device"
    return TransferError(f"{what}: {done.complaint}", where=where, todo=todo)


def checked(done: Result, argv: Sequence[str], *, label: str) -> Result:
    """`done` when its status is 0; else DeviceError with the command's own complaint."""
    if done.status == 0:
        return done
    command = argv[0] if argv[:2] != ["sh", "-c"] else "a step on the device"
    if _NO_SUDO.search(done.complaint):
        raise DeviceError(
            f"{command} failed: {done.complaint}", where=label,
            todo="nobody can type a password there: allow the command in /etc/sudoers.d with NOPASSWD, or do without "
            "sudo",
        )  # fmt: skip
    raise DeviceError(
        f"{command} failed with status {done.status}: {done.complaint}", where=label,
        todo="run the command there by hand, or repeat with --debug",
    )  # fmt: skip
