"""Two network namespaces and a cable between them, for tests and for benchmarks/push.py. Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOST, DEVICE = "10.99.0.1", "10.99.0.2"
SLOW_CABLE = Path(__file__).with_name("slow_cable.py")


class Absent(RuntimeError):
    """What this machine lacks for such a network."""


@dataclass(frozen=True)
class Link:
    """The cable, by the namespaces at both ends; whatever is done to it goes with them."""

    host: str
    device: str

    def rate(self, mbit: float) -> None:
        """Limit both directions."""
        for end in (self.host, self.device):
            how = ["rate", f"{mbit}mbit", "burst", "32kb", "latency", "200ms"]
            must(["tc", "-n", end, "qdisc", "replace", "dev", "cable", "root", "tbf", *how])

    def lose(self, *match: str) -> None:
        """Drop what arrives at either end and matches: `--mode random --probability P`, or `--mode nth --every N`."""
        for end in (self.host, self.device):
            self._rule(end, "-m", "statistic", *match, "-j", "DROP")

    def black_hole(self) -> None:
        """Drop everything that arrives at either end, with no word to anybody."""
        for end in (self.host, self.device):
            self._rule(end, "-j", "DROP")

    def reset(self) -> None:
        """Answer everything that the host sends with a TCP reset; the device hears nothing of it."""
        self._rule(self.device, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")

    def heal(self) -> None:
        for end in (self.host, self.device):
            must(inside(end, "iptables", "-F", "INPUT"))

    def down(self) -> None:
        must(["ip", "-n", self.device, "link", "set", "cable", "down"])

    def up(self) -> None:
        must(["ip", "-n", self.device, "link", "set", "cable", "up"])

    def arrived(self) -> int:
        """Bytes that the device's end has taken in."""
        said = must(["ip", "-n", self.device, "-json", "-stats", "link", "show", "cable"])
        return json.loads(said)[0]["stats64"]["rx"]["bytes"]

    def _rule(self, end: str, *rule: str) -> None:
        done = run(inside(end, "iptables", "-I", "INPUT", *rule))
        if done.returncode != 0:
            raise Absent(f"the kernel has no such packet filter: {done.stderr.strip()}")


def inside(namespace: str, *argv: str) -> list[str]:
    """The argv that runs another in a network namespace."""
    return ["nsenter", f"--net=/run/netns/{namespace}", "--", *argv]


def run(argv: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def must(argv: list[str]) -> str:
    done = run(argv)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def cable() -> Iterator[Link]:
    """Two namespaces with a veth pair between them."""
    with _namespaces() as link:
        far_end = ["peer", "name", "cable", "netns", link.device]
        must(["ip", "-n", link.host, "link", "add", "cable", "type", "veth", *far_end])
        _switch_on(link)
        link.lose("--mode", "nth", "--every", "5", "--packet", "0")  # what the kernel cannot do is told of here
        link.reset()
        link.heal()
        yield link


@contextlib.contextmanager
def slow_cable(*, delay_ms: float, mbit: float = 1000, loss: float = 0) -> Iterator[Link]:
    """Two namespaces with a cable that delays each way by `delay_ms`; see slow_cable.py."""
    if not Path("/dev/net/tun").exists():
        raise Absent("there is no /dev/net/tun")
    with _namespaces() as link, contextlib.ExitStack() as stack:
        argv = [sys.executable, str(SLOW_CABLE), link.host, link.device]
        argv += ["--delay-ms", str(delay_ms), "--mbit", str(mbit), "--loss", str(loss)]
        relay = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(relay.stdin.close)
        if relay.stdout.readline() != b"ready\n":
            raise Absent("no TUN device can be made")
        _switch_on(link)
        yield link


@contextlib.contextmanager
def _namespaces() -> Iterator[Link]:
    if os.geteuid() != 0:
        raise Absent("network namespaces need root")
    for program in ("ip", "tc", "iptables", "nsenter"):
        if shutil.which(program) is None:
            raise Absent(f"{program} is not installed (Debian: iproute2, iptables, util-linux)")
    mark = f"eo-{os.getpid():x}-{secrets.token_hex(3)}"
    link = Link(f"{mark}-h", f"{mark}-d")
    with contextlib.ExitStack() as stack:
        for end in (link.host, link.device):
            made = run(["ip", "netns", "add", end])
            if made.returncode != 0:
                raise Absent(f"no network namespace can be made: {made.stderr.strip()}")
            stack.callback(run, ["ip", "netns", "del", end])
        yield link


def _switch_on(link: Link) -> None:
    for end, address in ((link.host, HOST), (link.device, DEVICE)):
        must(["ip", "-n", end, "address", "add", f"{address}/24", "dev", "cable"])
        must(["ip", "-n", end, "link", "set", "lo", "up"])
        must(["ip", "-n", end, "link", "set", "cable", "up"])
