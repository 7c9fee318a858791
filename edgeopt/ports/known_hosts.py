"""Host keys: which ones the user's known_hosts files hold for a host, and the words for a key that is not there.

paramiko's own HostKeys knows neither the line of an entry, nor patterns, nor @revoked, and all three decide here.
The format is that of sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgeopt.errors import HostKeyError


@dataclass(frozen=True)
class HostKey:
    """A public key as the wire has it: its type (`ssh-ed25519`) and its bytes."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class KnownKey:
    """An entry of a known_hosts file: the key, whether it is revoked, and where it stands."""

    key: HostKey
    revoked: bool
    file: Path
    line: int


def authority(files: Iterable[Path], name: str) -> str | None:
    """ "FILE, line N" of an entry that trusts a certificate authority for `name`, None where there is none."""
    for file in files:
        with contextlib.suppress(OSError):
            for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
                fields = line.split()
                if len(fields) > 3 and fields[0] == "@cert-authority" and _matches(fields[1], name):
                    return f"{file}, line {number}"
    return None


def known_keys(files: Iterable[Path], name: str) -> list[KnownKey]:
    """The entries of `files` for `name`: "host", or "[host]:port" where the port is not 22."""
    found = []
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            entry = _parse(line, name)
            if entry is not None:
                found.append(KnownKey(entry[0], entry[1], file, number))
    return found


def check(key: HostKey, known: list[KnownKey], *, where: str, name: str) -> bool:
    """True when `key` is known, False when nothing is known of the host; HostKeyError when it changed or is revoked."""
    for entry in known:
        if entry.revoked and entry.key == key:
            raise HostKeyError(
                f"the host key {key.fingerprint} is revoked by {entry.file}, line {entry.line}", where=where,
                todo="do not connect; ask who runs the device for its new key",
            )  # fmt: skip
    trusted = [entry for entry in known if not entry.revoked]
    if any(entry.key == key for entry in trusted):
        return True
    if not trusted:
        return False
    other = next((entry for entry in trusted if entry.key.kind == key.kind), trusted[0])
    raise HostKeyError(
        "the host key has changed: somebody may be listening in, or the device was set up anew\n"
        f"  it shows: {key.fingerprint} ({key.kind})\n"
        f"  known:    {other.key.fingerprint} ({other.key.kind}), {other.file}, line {other.line}",
        where=where,
        todo=f"compare the key on the device's own console; if it is right: "
        f"ssh-keygen -R '{name}' -f {other.file}, then connect with --accept-new-host-key",
    )


def unknown(
    key: HostKey, *, where: str, host: str, port: int, file: Path, authority: str | None = None
) -> HostKeyError:
    """The refusal of a host that no known_hosts file names; `authority` is where one trusts an authority for it."""
    signed = f", and its certificate ({authority}) cannot be checked here: write the key itself down"
    return HostKeyError(
        f"the host key is not known: {key.fingerprint} ({key.kind}) is not in {file}{signed if authority else ''}",
        where=where,
        todo="compare the fingerprint on the device's own console (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub), then "
        f"ssh-keyscan -p {port} {host} >> {file}, or repeat with --accept-new-host-key",
    )


def add(key: HostKey, name: str, file: Path) -> None:
    """Append the key to `file`, made where it is missing (folder 0700, file 0600). HostKeyError where it cannot."""
    line = f"{name} {key.kind} {base64.b64encode(key.blob).decode()}\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(fd, "rb+", buffering=0) as f:
            size = f.seek(0, os.SEEK_END)
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = "\n" + line
            f.write(line.encode())
    except OSError as why:
        raise HostKeyError(
            f"cannot write the host key: {why.strerror}", where=str(file), todo="check the file's permissions"
        ) from None


def _parse(line: str, name: str) -> tuple[HostKey, bool] | None:
    """(key, revoked) of a line that speaks of `name`, else None."""
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    # a certificate authority's key signs host certificates, which paramiko does not check
    if len(fields) < 3 or fields[0].startswith("#") or marker == "@cert-authority":
        return None
    if not _matches(fields[0], name):
        return None
    with contextlib.suppress(ValueError):  # binascii.Error, and what is not ASCII
        return HostKey(fields[1], base64.b64decode(fields[2], validate=True)), marker == "@revoked"
    return None


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        return _matches_hash(patterns, name)
    matched = False
    for pattern in patterns.split(","):
        # brackets are literal in this format, and a set of characters to fnmatch
        plain = pattern.removeprefix("!").lower().replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), plain):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def _matches_hash(pattern: str, name: str) -> bool:
    try:
        _, _, salt, expected = pattern.split("|")
        given = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(given, base64.b64decode(expected))
    except (ValueError, binascii.Error):
        return False
