"""From what the user calls a host to the machines on the way to it: `~/.ssh/config` and `user@host[:port]`."""

from __future__ import annotations

import getpass
import glob
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeopt.errors import HostError, UsageError
from edgeopt.progress import log

MAX_HOPS = 8
_KEY_FILES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"

# the conditions of Match that paramiko knows, and how many words follow each
_CONDITIONS = {"all": 0, "canonical": 0, "final": 0, "host": 1, "originalhost": 1, "user": 1, "localuser": 1, "exec": 1}

Lookup = Callable[[str], Mapping[str, Any]]
"""From a host's name to its options, keys in lower case (paramiko's SSHConfig.lookup)."""


@dataclass(frozen=True)
class Endpoint:
    """One machine to log in to, with all that the configuration says of it."""

    alias: str  # as the user or ProxyJump named it
    host: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    certificate_files: tuple[Path, ...]
    identities_only: bool
    known_hosts: tuple[Path, ...]  # the first one takes new keys
    known_as: str  # the name of the host in known_hosts
    accept_new: bool
    proxy_command: str | None
    connect_timeout_s: float
    silence_s: float | None  # what ServerAliveInterval and ServerAliveCountMax make of it

    @property
    def label(self) -> str:
        return f"{self.user}@{self.address}"

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def route(host: str, lookup: Lookup) -> tuple[Endpoint, ...]:
    """The machines to log in to, one through the other; the last is `host`. UsageError where it is no host."""
    return _route(host, lookup, MAX_HOPS)


def _route(host: str, lookup: Lookup, hops_left: int) -> tuple[Endpoint, ...]:
    if hops_left == 0:
        raise HostError(
            f"ProxyJump leads through more than {MAX_HOPS} hosts",
            where=host,
            todo="look for a circle in ~/.ssh/config",
        )
    end, jump = _endpoint(host, lookup)
    if not jump:
        return (end,)
    first, *others = [hop.strip() for hop in jump.split(",")]
    # as ssh does it: only the first hop's own ProxyJump counts, the others are reached through the one before
    way = _route(first, lookup, hops_left - 1)
    return (*way, *(_endpoint(hop, lookup)[0] for hop in others), end)


def _endpoint(given: str, lookup: Lookup) -> tuple[Endpoint, str | None]:
    """The machine itself, and its ProxyJump where it has one."""
    user, name, port = parse(given)
    options = lookup(name)
    host = options.get("hostname", name)
    port = port or _number(options, "port", 22, where=given)
    known = _paths(options.get("userknownhostsfile", _KNOWN_HOSTS))
    end = Endpoint(
        alias=given,
        host=host,
        port=port,
        user=user or options.get("user") or getpass.getuser(),
        identity_files=tuple(_path(p) for p in options.get("identityfile", _KEY_FILES) if p.lower() != "none"),
        certificate_files=tuple(_path(p) for p in _several(options.get("certificatefile")) if p.lower() != "none"),
        # a key that is named is meant: the agent's others would only be offered to a stranger and use up the tries
        identities_only=options.get("identitiesonly", "yes" if "identityfile" in options else "no").lower() == "yes",
        known_hosts=known + _paths(options.get("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS)),
        known_as=options.get("hostkeyalias") or (host if port == 22 else f"[{host}]:{port}"),
        accept_new=options.get("stricthostkeychecking", "yes").lower() == "accept-new",
        proxy_command=_proxy_command(options, host, port),
        connect_timeout_s=_number(options, "connecttimeout", 10, where=given),
        silence_s=_silence_s(options, where=given),
    )
    jump = options.get("proxyjump")
    return end, jump if jump and jump.lower() != "none" else None


def parse(host: str) -> tuple[str | None, str, int | None]:
    """(user, host, port) of `[user@]host[:port]`; IPv6 in brackets where a port follows.

    UsageError for anything else, and for a password in it, whose words do not repeat it.
    """
    user, at, rest = host.rpartition("@")
    if ":" in user or "://" in host:
        raise UsageError(
            f"a host is no URL and carries no password: '...@{rest}'" if at else "a host is no URL",
            todo="give user@host[:port] and a key (ssh-copy-id); a password that you typed is in your shell's history "
            "now: change it",
        )
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::(\d+))?", rest)
    if bracketed:
        name, port = bracketed.groups()
    elif rest.count(":") > 1:
        name, port = rest, None
    else:
        name, _, port = rest.partition(":")
    valid = re.fullmatch(r"[^\s\[\]/'\"$`\\-][^\s\[\]/'\"$`\\]*", name) and (
        ":" not in rest or port or rest.count(":") > 1
    )
    if not valid or (at and not user) or not _is_port(port):
        raise UsageError(
            f"'{host}' is not a host",
            todo="give an alias of ~/.ssh/config or user@host[:port] ([v6 address]:port)",
        )
    return user or None, name, int(port) if port else None


def _is_port(port: str | None) -> bool:
    return not port or (port.isdigit() and 0 < int(port) < 65536)


def read(path: Path, *, depth: int = 16) -> str:
    """The text of a configuration with its `Include` lines replaced by what they name, which paramiko does not do.

    HostError where `path` cannot be read or includes itself.
    """
    if depth == 0:
        raise HostError("Include lines lead in a circle", where=str(path), todo="remove one of them")
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as why:
        raise HostError(f"cannot read it: {why.strerror}", where=str(path), todo="check --ssh-config") from None
    out, block = [], "Host *"
    for line in lines:
        included = re.match(r"\s*include[\s=]+(.+)", line, re.IGNORECASE)
        if included:
            for file in _included(included[1]):
                # the included file's last block ends with it
                out += [read(file, depth=depth - 1), block]
            continue
        if re.match(r"\s*(host|match)\s", line, re.IGNORECASE):
            block = line = _understood(line, path)
        out.append(line)
    return "\n".join(out) + "\n"


def _understood(block: str, path: Path) -> str:
    """The first line of a block, or one that matches nothing: paramiko lets conditions it does not know hold."""
    words = re.findall(r'"[^"]*"|[^\s=]+', block.lower())
    if words[0] == "host":
        return block
    unknown = words[1:]
    while unknown and unknown[0].lstrip("!") in _CONDITIONS:
        unknown = unknown[1 + _CONDITIONS[unknown[0].lstrip("!")] :]
    if not unknown:
        return block
    log.warning("%s: 'Match %s' is not understood, its block does not count", path, unknown[0])
    return "Host !*"


def _included(patterns: str) -> list[Path]:
    found = []
    for pattern in patterns.split():
        expanded = os.path.expanduser(pattern.strip('"'))
        found += sorted(glob.glob(os.path.join(Path.home() / ".ssh", expanded)))
    return [Path(file) for file in found]


def _proxy_command(options: Mapping[str, Any], host: str, port: int) -> str | None:
    command = options.get("proxycommand")
    if not command or command.lower() == "none":
        return None
    # paramiko fills the tokens from the configuration alone, and does not see a port given as host:port
    return command.replace("%h", host).replace("%p", str(port))


def _number(options: Mapping[str, Any], key: str, default: int, *, where: str) -> int:
    value = options.get(key, default)
    try:
        return int(value)
    except ValueError:
        raise HostError(f"'{key}' is not a number: {value}", where=f"ssh configuration of {where}") from None


def _several(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _silence_s(options: Mapping[str, Any], *, where: str) -> float | None:
    """Half of what ssh would wait for an answer: a device is asked after one silence and given up after another."""
    interval = _number(options, "serveraliveinterval", 0, where=where)
    return interval * max(1, _number(options, "serveralivecountmax", 3, where=where)) / 2 if interval > 0 else None


def _paths(value: str) -> tuple[Path, ...]:
    return tuple(_path(p.strip('"')) for p in value.split() if p.lower() != "none")


def _path(value: str) -> Path:
    return Path(value.replace("%d", str(Path.home()))).expanduser()
