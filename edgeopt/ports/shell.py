"""The one place where a command becomes a string for a login shell, and its output is told from the shell's own.

sshd hands the command to the user's login shell, which may be fish, and which may print a greeting (.bashrc). So
the command is wrapped as `sh -c '...'`, quoted in a way that POSIX shells and fish read alike, and the output is
framed by a random token: what comes before the first token is the shell's, what follows the last is not ours.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence


def new_token() -> str:
    """A token that no command prints by accident."""
    return "edgeopt-" + secrets.token_hex(16)


def wrap(argv: Sequence[str], token: str) -> str:
    """The string for the login shell that runs `argv` in sh and frames stdout and stderr by `token`.

    stdout: `TOKEN PID\\n`, the output, `TOKEN STATUS\\n`; stderr the same without the numbers. Nothing that the
    command makes is writable for others, whatever the account's umask.
    """
    framed = (
        "umask go-w\n"
        f"printf '%s\\n' {token} >&2; printf '%s %d\\n' {token} $$\n"
        f"{shlex.join(argv)}\n"
        f"s=$?; printf '%s\\n' {token} >&2; printf '%s %d\\n' {token} $s\n"
    )
    return "sh -c " + quote(framed)


def stop(pid: int) -> str:
    """The string for the login shell that ends the command whose shell has `pid`, and its children."""
    # sshd makes the login shell the leader of a group, and most login shells become our sh
    return "sh -c " + quote(f"kill -- -{pid} 2>/dev/null || kill {pid}")


def quote(text: str) -> str:
    """`text` as one word for a POSIX shell and for fish.

    fish reads a backslash inside single quotes as an escape, so backslashes stand outside of them.
    """
    return "'" + text.replace("'", "'\"'\"'").replace("\\", "'\\\\'") + "'"


class Frame:
    """What lies between the tokens of one stream, fed in pieces of any size.

    `pid` and `status` are the numbers after the first and the last token, `started` and `ended` tell which of
    them were seen, and `noise` is what came before the first.
    """

    def __init__(self, token: str):
        self._token = token.encode()
        self._held = b""
        self.noise = b""
        self.started = False
        self.ended = False
        self.pid: int | None = None
        self.status: int | None = None

    def feed(self, data: bytes) -> bytes:
        """The part of the output that `data` completes; may be empty while a token could still be arriving."""
        if self.ended:
            return b""
        self._held += data
        if not self.started and not self._start():
            return b""
        at = self._held.find(self._token)
        if at < 0:
            return self._release(len(self._held) - self._partial())
        number, newline, _ = self._held[at + len(self._token) :].partition(b"\n")
        if newline:
            self.ended, self.status = True, _number(number)
        return self._release(at)

    def _start(self) -> bool:
        noise, token, rest = self._held.partition(self._token)
        number, newline, output = rest.partition(b"\n")
        self.noise = noise
        if token and newline:
            self.started, self.pid, self._held = True, _number(number), output
        return self.started

    def _partial(self) -> int:
        """How many bytes at the end of what is held may be the beginning of a token."""
        longest = min(len(self._token) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(self._token[:n])), 0)

    def _release(self, count: int) -> bytes:
        out, self._held = self._held[:count], self._held[count:]
        return out


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() else None
