"""A TCP relay on loopback between a client and a server: it counts, cuts and goes silent."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Forwards every connection to 127.0.0.1:`target`. Use it in a `with` block.

    `to_server`, `to_client`: bytes forwarded since `reset`. `cut_after`: so many bytes to the server, then every
    connection is closed. `silent_after`: so many, then nothing is forwarded any more and nothing closed.
    """

    def __init__(self, target: int, *, cut_after: int | None = None, silent_after: int | None = None):
        self.target = target
        self.cut_after = cut_after
        self.silent_after = silent_after
        self.reset()
        self._open: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        self.to_server = self.to_client = 0

    @property
    def total(self) -> int:
        return self.to_server + self.to_client

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection at once."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._open.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                self._open += [client, server]
                threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
                threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self.cut_after is not None:
                    data = data[: self.cut_after - self.to_server]
                if self._is_silent():
                    continue
                server.sendall(data)
                self.to_server += len(data)
                if self.to_server == self.cut_after:
                    self.cut_after = None
                    self.cut()
                    return
        with contextlib.suppress(OSError):  # a client that was reset has ended too
            server.shutdown(socket.SHUT_WR)

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self._is_silent():
                    continue
                client.sendall(data)
                self.to_client += len(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)

    def _is_silent(self) -> bool:
        return self.silent_after is not None and self.to_server >= self.silent_after
