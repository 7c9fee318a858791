"""The one place that chooses a Connection: nothing for this machine, else SSH."""

from __future__ import annotations

from pathlib import Path

from edgeopt.ports.connection import Connection
from edgeopt.ports.local import LocalConnection


def connect(host: str | None, *, accept_new: bool = False, config: Path | None = None) -> Connection:
    """A Connection to `host`: an alias of ~/.ssh/config or `user@host[:port]`; None is this machine.

    `config` is read instead of ~/.ssh/config. `accept_new` writes the key of a host that was never seen into the
    known hosts; a key that changed is refused all the same. No I/O happens before the first command.
    """
    if host is None:
        return LocalConnection()
    from edgeopt.ports.ssh import SSHConnection

    return SSHConnection(host, accept_new=accept_new, config=config)
