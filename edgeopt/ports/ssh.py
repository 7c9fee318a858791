"""A device over SSH; paramiko is imported here and in ssh_login, and nowhere else.

Files travel through the stdin and stdout of commands, not through SFTP: it takes fewer round trips, the device's
own error messages come back ('No space left on device' instead of SFTP's 'Failure'), and a login shell that
prints a greeting cannot break it. aes128-gcm first makes it as fast as pipelined SFTP.

paramiko has calls without deadline (exec_command, a send into a full socket), so every operation runs under a
watchdog that shuts the socket, and a device that says nothing for `silence_s` is asked for a sign of life.

Nothing of ours is forwarded: no agent, no X11, no ports.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import paramiko

from edgeopt.errors import DeviceError, EdgeoptError, HostError, TransferError
from edgeopt.ports import known_hosts, shell, ssh_config, ssh_login
from edgeopt.ports.connection import CommandEnded, Connection, Result, checked
from edgeopt.ports.known_hosts import HostKey
from edgeopt.ports.ssh_command import PIECE_BYTES, WINDOW_BYTES, Command
from edgeopt.ports.ssh_config import Endpoint
from edgeopt.ports.watchdog import Watchdog
from edgeopt.progress import Advance, log

# Linux's numbers; Python names them only on some platforms
TCP_CONGESTION, TCP_USER_TIMEOUT, TCP_NOTSENT_LOWAT = 13, 18, 25
UNSENT_BYTES = 128 << 10
KEEPALIVE_S = 5
SILENCE_S = 15
STARTS = 3  # of ConnectTimeout, that the slowest login shell may take
START_S = 3  # a login shell takes less; after it we ask whether commands run there at all

# SSH_FXP_INIT of version 3 (draft-ietf-secsh-filexfer-02, 4): an SFTP server answers, a shell's `true` does not read it
SFTP_INIT = b"\0\0\0\5\1\0\0\0\3"
_LOST = (paramiko.SSHException, EOFError, OSError)


class SSHConnection(Connection):
    """A device that `host` names, an alias of ~/.ssh/config or `user@host[:port]`. Connects at the first command.

    `silence_s`: how long the device may say nothing before it is asked for a sign of life, and then until it is
    given up; None: half of ServerAliveInterval times ServerAliveCountMax of the configuration, else 15. See
    `ports.connect` for the other arguments.
    """

    def __init__(
        self, host: str, *, accept_new: bool = False, config: Path | None = None, silence_s: float | None = None
    ):
        self.label = host
        self._host = host
        self._accept_new = accept_new
        self._config = config
        self._silence_given_s = silence_s
        self._transport: paramiko.Transport | None = None
        self._closing = contextlib.ExitStack()
        self._sockets: list[socket.socket] = []

    @functools.cached_property
    def _way(self) -> tuple[Endpoint, ...]:
        """The machines to log in to, one through the other; the last is the device."""
        return ssh_config.route(self._host, ssh_login.lookup(self._config))

    @property
    def silence_s(self) -> float:
        """See the class. The configuration is read for it."""
        if self._silence_given_s is not None:
            return self._silence_given_s
        return self._way[-1].silence_s or SILENCE_S

    def reach(self) -> None:
        if self._transport is None:
            self._transport = self._connected()

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
        self.reach()
        with self._guarded(self.silence_s) as dog, self._start(argv, stdout) as command:
            self._exchange(command, stdin, timeout_s, dog, advance)
            done = command.result(self.label)
        return checked(done, argv, label=self.label) if check else done

    @contextlib.contextmanager
    def hold(self, argv: Sequence[str], *, timeout_s: float = 30, beat_s: float | None = None) -> Iterator[str]:
        self.reach()
        with contextlib.ExitStack() as held:
            with self._guarded(self.silence_s) as dog:
                command = held.enter_context(self._start(argv, None))
                self._exchange(command, None, timeout_s, dog, None, until=command.has_line)
                if not command.has_line():
                    raise CommandEnded(command.result(self.label))
            try:
                with command.beating(beat_s):
                    yield command.first_line()
            except BaseException:
                with contextlib.suppress(EdgeoptError):
                    self._end(command, timeout_s)
                raise
            self._end(command, timeout_s)

    def _end(self, command: Command, timeout_s: float) -> None:
        """Close stdin and wait for the end: what the command held must be free when its block is left."""
        with self._guarded(self.silence_s) as dog:
            self._exchange(command, b"", timeout_s, dog, None)

    def close(self) -> None:
        if self._transport is not None:
            with self._guarded(2, quiet=True):
                self._closing.close()
        self._transport = None

    def _exchange(
        self,
        command: Command,
        stdin: bytes | BinaryIO | None,
        timeout_s: float,
        dog: Watchdog,
        advance: Advance | None,
        until: Callable[[], bool] | None = None,
        ask_after_s: float = START_S,
    ) -> None:
        """Feed stdin (None: leave it open) and drain both streams until the command or `until` ends it."""
        until = until or command.has_ended
        streams = not isinstance(stdin, bytes | None) or command.to_file
        source = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        piece, done_sending = b"", source is None
        started = heard = time.monotonic()
        ask_at = started + ask_after_s
        while not until() and not command.has_ended():
            dog.kick()
            moved_out = moved_in = 0
            if not done_sending:
                piece = piece or _read(source)
                moved_out = command.send(piece)
                piece = piece[moved_out:]
                done_sending = not piece and not moved_out
            moved_in = command.drain(wait_s=min(0.5, timeout_s, self.silence_s / 2) if done_sending else 0)
            now = time.monotonic()
            if moved_out or moved_in:
                heard = now
                started = now if streams else started
                if advance is not None:
                    advance(moved_in if command.to_file else moved_out)
            if now - started > timeout_s:
                self._give_up(command, timeout_s, dog)
            if now - heard > self.silence_s:
                self._ask_for_a_sign(dog)
                heard = time.monotonic()
            if now > ask_at and command.pid is None:
                self._ask_the_shell(timeout_s, dog)
                ask_at = now + timeout_s

    def _ask_for_a_sign(self, dog: Watchdog) -> None:
        """Any answer will do, and a refusal is one; where none comes the watchdog cuts the socket."""
        dog.kick()
        self._transport.global_request("keepalive@openssh.com", wait=True)
        if not self._transport.is_active():
            raise EOFError

    def _ask_the_shell(self, timeout_s: float, dog: Watchdog) -> None:
        """HostError where commands do not run there: an SFTP server, for one, waits for ever for a packet."""
        patience_s = min(timeout_s, STARTS * self._way[-1].connect_timeout_s)
        with self._start(["true"], None) as probe:
            probe.send(SFTP_INIT)
            self._exchange(probe, None, patience_s, dog, None, until=probe.is_sftp, ask_after_s=math.inf)
            probe.result(self.label)

    def _give_up(self, command: Command, timeout_s: float, dog: Watchdog) -> None:
        self._ask_for_a_sign(dog)
        if command.pid is None:
            raise HostError(
                f"the login shell did not start the command within {timeout_s:g} s: something before it waits",
                where=self.label, todo="log in by ssh and run: sh -c 'echo hello'; see ForceCommand and the shell's rc",
            )  # fmt: skip
        with contextlib.closing(self._session()) as channel:
            channel.exec_command(shell.stop(command.pid))
            channel.status_event.wait(2)
        raise DeviceError(
            f"{command.name} did not finish within {timeout_s:g} s and was stopped", where=self.label,
            todo="see what it waits for on the device, or allow it more time",
        )  # fmt: skip

    @contextlib.contextmanager
    def _start(self, argv: Sequence[str], sink: BinaryIO | None) -> Iterator[Command]:
        channel = self._session()
        command = Command(channel, argv[0], sink)
        try:
            channel.exec_command(shell.wrap(argv, command.token))
            yield command
        finally:
            command.close()

    def _session(self) -> paramiko.Channel:
        """A session; on a connection of its own where sshd allows no more of them on the one that we have."""
        try:
            return self._transport.open_session()
        except paramiko.ChannelException:
            self._transport = self._connected()
        try:
            return self._transport.open_session()
        except paramiko.ChannelException as why:
            raise HostError(
                f"sshd allows no session: {why.text}", where=self.label,
                todo="set MaxSessions to 1 or more in the device's sshd_config",
            ) from None  # fmt: skip

    @contextlib.contextmanager
    def _guarded(self, patience_s: float, *, quiet: bool = False) -> Iterator[Watchdog]:
        """A block in which a silent or broken link ends as our error."""
        with Watchdog(patience_s, self._cut) as dog:
            try:
                yield dog
                if dog.fired and not quiet:
                    raise EOFError
            except _LOST as why:
                if quiet:
                    return
                if dog.fired or isinstance(why, TimeoutError):
                    raise HostError(
                        f"the device fell silent: nothing for {dog.patience_s:g} s", where=self.label,
                        todo="see whether it is up and the network in order, then repeat: a push resumes",
                    ) from None  # fmt: skip
                raise TransferError(
                    f"the connection broke: {str(why) or 'closed by the other side'}", where=self.label,
                    todo="repeat: a push resumes where it was",
                ) from None  # fmt: skip

    def _cut(self) -> None:
        """Shut the first socket of every way: whatever waits on it, or on a tunnel through it, wakes up."""
        while self._sockets:
            sock = self._sockets.pop()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _connected(self) -> paramiko.Transport:
        """A connection to the device, logged in."""
        _silence_paramiko()
        transport: paramiko.Transport | None = None
        for end in self._way:
            self.label = end.label
            with self._reaching(end):
                sock = self._open(end, through=transport)
                transport = self._log_in(end, sock)
        transport.set_keepalive(KEEPALIVE_S)
        return transport

    @contextlib.contextmanager
    def _reaching(self, end: Endpoint) -> Iterator[None]:
        """Turns what goes wrong on the way to `end` into a HostError that says which it was."""
        where = f"{end.address} ('{end.alias}')" if end.alias != end.address else end.address
        # a connection has several steps, and each has a deadline of its own below this one
        dog = Watchdog(4 * end.connect_timeout_s, self._cut)
        try:
            with dog:
                yield
        except EdgeoptError:
            self._closing.close()
            raise
        except _LOST as why:
            self._closing.close()
            silent = ("it fell silent while connecting", "see whether it is up")
            what, todo = silent if dog.fired else ssh_login.reason(why)
            raise HostError(f"cannot connect: {what}", where=where, todo=todo) from None

    def _open(self, end: Endpoint, through: paramiko.Transport | None) -> socket.socket | paramiko.Channel:
        if through is not None:
            to = (end.host, end.port)
            return through.open_channel("direct-tcpip", to, ("127.0.0.1", 0), timeout=end.connect_timeout_s)
        if end.proxy_command:
            sock = self._proxy(end.proxy_command)
        else:
            sock = socket.create_connection((end.host, end.port), timeout=end.connect_timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # other kernels than Linux
                # after our own deadlines, which know what was waited for
                sock.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, int(self.silence_s * 2000) + 5000)
            with contextlib.suppress(OSError):
                # megabytes that wait in the kernel would hold up a sign of life for longer than we wait for it
                sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            with contextlib.suppress(OSError):  # where it may be used, a lossy link is ten times as fast with it
                sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, b"bbr")
        self._sockets.append(sock)
        self._closing.callback(self._cut)
        return sock

    def _proxy(self, command: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        child = subprocess.Popen(["sh", "-c", "exec " + command], stdin=theirs, stdout=theirs)
        theirs.close()
        self._closing.callback(child.wait)
        self._closing.callback(child.terminate)
        return ours

    def _log_in(self, end: Endpoint, sock: socket.socket | paramiko.Channel) -> paramiko.Transport:
        transport = paramiko.Transport(sock, default_window_size=WINDOW_BYTES)
        transport.set_log_channel("paramiko.edgeopt")
        transport.banner_timeout = transport.auth_timeout = end.connect_timeout_s
        self._closing.callback(transport.close)
        known = known_hosts.known_keys(end.known_hosts, end.known_as)
        ssh_login.prefer(transport, [entry.key.kind for entry in known if not entry.revoked])
        transport.start_client(timeout=end.connect_timeout_s)
        key = HostKey(transport.get_remote_server_key().get_name(), transport.get_remote_server_key().asbytes())
        self._check_host_key(end, key, known)
        ssh_login.authenticate(transport, end)
        return transport

    def _check_host_key(self, end: Endpoint, key: HostKey, known: list[known_hosts.KnownKey]) -> None:
        files = end.known_hosts or (Path.home() / ".ssh" / "known_hosts",)
        if known_hosts.check(key, known, where=end.address, name=end.known_as):
            return
        if not (self._accept_new or end.accept_new):
            authority = known_hosts.authority(end.known_hosts, end.known_as)
            raise known_hosts.unknown(
                key, where=end.address, host=end.host, port=end.port, file=files[0], authority=authority
            )
        known_hosts.add(key, end.known_as, files[0])
        log.warning("%s: new host key %s (%s) added to %s", end.address, key.fingerprint, key.kind, files[0])


def _read(source: BinaryIO) -> bytes:
    try:
        return source.read(PIECE_BYTES)
    except OSError as why:
        raise TransferError(f"cannot read the file here: {why.strerror}", where=str(source.name)) from None


def _silence_paramiko() -> None:
    # without a handler paramiko's own tracebacks go to stderr; what they tell is in our errors
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
