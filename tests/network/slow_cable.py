"""A cable in user space between two network namespaces: it delays, limits the rate and loses packets.

    python tests/network/slow_cable.py NAMESPACE NAMESPACE --delay-ms 12.5 --mbit 100 --loss 0.01

Kernels without netem cannot delay. Two TUN devices called `cable`, one a namespace, end here: what one sends waits for
its turn at the rate, then for the delay, and goes out of the other. "ready" is printed once both are there; it ends
with its stdin.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time

MTU = 1500
QUEUE_PACKETS = 1000  # a switch's queue, and Linux's default of a device
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_CLONE_NEWNET = 0x40000000


def open_end(namespace: str) -> int:
    """The descriptor of a new TUN device `cable` in `namespace`, which this thread then is in."""
    libc = ctypes.CDLL(None, use_errno=True)
    inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(inside, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(inside)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"cable", _IFF_TUN | _IFF_NO_PI))
    return end


class Direction:
    """What is on its way from one end to the other, in order."""

    def __init__(self, source: int, sink: int, *, delay_s: float, bytes_per_s: float, loss: float, seed: int):
        self.source, self.sink = source, sink
        self._delay_s, self._bytes_per_s, self._loss = delay_s, bytes_per_s, loss
        self._chance = random.Random(seed)
        self._queue: collections.deque[tuple[float, bytes]] = collections.deque()
        self._free_at = 0.0  # when the line has sent what is queued

    def take(self, now: float) -> None:
        """Queue all that waits at the source; drop what is lost, and what the queue has no room for."""
        while True:
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            waiting_bytes = (self._free_at - now) * self._bytes_per_s
            if self._chance.random() < self._loss or waiting_bytes > QUEUE_PACKETS * MTU:
                continue
            self._free_at = max(now, self._free_at) + len(packet) / self._bytes_per_s
            self._queue.append((self._free_at + self._delay_s, packet))

    def give(self, now: float) -> None:
        while self._queue and self._queue[0][0] <= now:
            try:
                os.write(self.sink, self._queue.popleft()[1])
            except OSError:  # the device's own queue is full, or it is down
                continue

    def wait_s(self, now: float) -> float | None:
        return max(0.0, self._queue[0][0] - now) if self._queue else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--delay-ms", type=float, default=0, help="one way")
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--loss", type=float, default=0, help="of packets, each way")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    here, there = (open_end(name) for name in asked.namespaces)
    how = {"delay_s": asked.delay_ms / 1e3, "bytes_per_s": asked.mbit * 1e6 / 8, "loss": asked.loss}
    ways = [Direction(here, there, **how, seed=asked.seed), Direction(there, here, **how, seed=asked.seed + 1)]
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        waits = [wait for way in ways if (wait := way.wait_s(now)) is not None]
        ready, _, _ = select.select([here, there, sys.stdin], [], [], min(waits, default=None))
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
            return
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                way.take(now)
            way.give(now)


if __name__ == "__main__":
    main()
