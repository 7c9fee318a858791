"""Logging in over SSH: what the configuration says, which algorithms and keys are tried, and what went wrong."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import paramiko

from edgeopt.errors import HostError
from edgeopt.ports import ssh_config
from edgeopt.ports.ssh_config import Endpoint
from edgeopt.progress import log

FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


def lookup(config: Path | None) -> ssh_config.Lookup:
    """The options of a host by its name, from `config` or ~/.ssh/config. HostError where it cannot be read."""
    file = config or Path.home() / ".ssh" / "config"
    text = ssh_config.read(file) if config is not None or file.is_file() else ""
    try:
        parsed = paramiko.SSHConfig.from_text(text)
    except paramiko.SSHException as why:
        raise HostError(f"cannot be understood: {why}", where=str(file), todo="correct the line") from None

    def options(name: str):
        try:
            return parsed.lookup(name)
        except (paramiko.SSHException, ImportError, KeyError) as why:
            raise HostError(
                f"a line is not supported: {why}",
                where=str(file),
                todo="give --ssh-config FILE with plain Host blocks",
            ) from None

    return options


def prefer(transport: paramiko.Transport, known_kinds: list[str]) -> None:
    """Ask for the host key types that we know of the host, and for the ciphers that are fast."""
    options = transport.get_security_options()
    fast = [c for c in FAST_CIPHERS if c in options.ciphers]
    options.ciphers = (*fast, *(c for c in options.ciphers if c not in fast))
    known = [k for k in options.key_types if _kind(k) in known_kinds]
    options.key_types = (*known, *(k for k in options.key_types if k not in known))


def _kind(algorithm: str) -> str:
    """The type of key that a signature algorithm uses."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def authenticate(transport: paramiko.Transport, end: Endpoint) -> None:
    """Log in with the agent's keys and the configured files. HostError names what was tried."""
    tried: list[str] = []
    locked: list[Path] = []
    for name, key in _keys(end, tried, locked):
        tried.append(name)
        try:
            more = transport.auth_publickey(end.user, key)
        except paramiko.BadAuthenticationType as why:
            raise HostError(
                f"login with a key is not allowed, only: {', '.join(why.allowed_types)}", where=end.label,
                todo="set 'PubkeyAuthentication yes' in the device's sshd_config",
            ) from None  # fmt: skip
        except paramiko.AuthenticationException:
            continue
        except (paramiko.SSHException, EOFError):
            break  # too many keys: sshd hangs up
        if not more:
            return
        raise HostError(
            f"login needs more than a key: {', '.join(more)}",
            where=end.label,
            todo="allow a key alone for this user",
        )
    if locked:
        raise HostError(
            f"the key {locked[0]} is encrypted and no agent holds it",
            where=end.label,
            todo=f"ssh-add {locked[0]}",
        )
    raise HostError(
        f"login refused for user '{end.user}': tried {', '.join(tried) or 'no key, as there is none'}", where=end.label,
        todo=f"ssh-copy-id -p {end.port} {end.user}@{end.host}, or name User and IdentityFile in ~/.ssh/config",
    )  # fmt: skip


def _keys(end: Endpoint, tried: list[str], locked: list[Path]) -> Iterator[tuple[str, paramiko.PKey]]:
    """The keys to try: those of the agent that are configured, the configured files, then the agent's others."""
    agent = paramiko.Agent()
    try:
        in_agent = {key.asbytes(): key for key in agent.get_keys()}
        for file in end.identity_files:
            held = in_agent.pop(_public(file), None)
            if held is not None:
                yield f"{file} (agent)", held
                continue
            try:
                yield from _with_certificates(paramiko.PKey.from_path(file), file, end.certificate_files)
            except FileNotFoundError:
                continue
            except (
                paramiko.PasswordRequiredException,
                TypeError,
            ):  # cryptography's word for a missing passphrase
                locked.append(file)
            except (OSError, ValueError, paramiko.SSHException, paramiko.UnknownKeyType) as why:
                tried.append(f"{file} (not readable: {why})")
        if not end.identities_only:
            yield from ((f"the agent's {key.get_name()}", key) for key in in_agent.values())
    finally:
        agent.close()


def _with_certificates(
    key: paramiko.PKey, file: Path, certificates: Iterable[Path]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """The key with each certificate that is made for it, then the key alone."""
    beside = file.with_name(file.name + "-cert.pub")
    for certificate in (*certificates, *([beside] if beside.is_file() else [])):
        try:
            key.load_certificate(str(certificate))
        except (OSError, ValueError, paramiko.SSHException) as why:
            log.warning("the certificate %s cannot be used: %s", certificate, why)
            continue
        # after its type and a nonce a certificate has the fields of the key: PROTOCOL.certkeys of OpenSSH
        if key.asbytes()[4 + len(key.get_name()) :] in key.public_blob.key_blob:
            yield f"{file} (certificate {certificate})", key
    key.public_blob = None
    yield str(file), key


def _public(file: Path) -> bytes | None:
    """The bytes of the public key beside a private one, by which the agent's keys are recognised."""
    try:
        return base64.b64decode(file.with_name(file.name + ".pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def reason(why: BaseException) -> tuple[str, str]:
    """(what, what to do) of an error while connecting."""
    if isinstance(why, socket.gaierror):
        return "the name is not known", "check the spelling, or add a Host block to ~/.ssh/config"
    if isinstance(why, ConnectionRefusedError):
        return "refused: nothing listens on that port", "see whether sshd runs there, and its port"
    if isinstance(why, TimeoutError):
        return "no answer in time", "see whether the device is up and reachable (ping)"
    if isinstance(why, paramiko.ChannelException):
        return (
            f"the jump host does not let us through: {why.text}",
            "check host and port, and AllowTcpForwarding there",
        )
    if isinstance(why, paramiko.IncompatiblePeer):
        return f"no algorithm in common: {why}", "update the device's OpenSSH"
    if "banner" in str(why) or "protocol version" in str(why):
        return "what listens on that port is no SSH server, or it is overloaded", "check host and port"
    return str(why) or "it hung up", "see the device's sshd log (journalctl -u ssh)"
