"""Two network namespaces and a cable between them: edgeopt's process in one, a device in the other. Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import absent
from tests.machine import Machine, require_root

HOST, DEVICE = "10.99.0.1", "10.99.0.2"
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Link:
    """The cable, as (namespace, interface) at both ends; everything that is done to it goes with the namespaces."""

    host: str
    device: str

    def rate(self, mbit: float) -> None:
        """Limit both directions."""
        for end in (self.host, self.device):
            must(["tc", "-n", end, "qdisc", "replace", "dev", "cable", "root", "tbf"]
                 + ["rate", f"{mbit}mbit", "burst", "32kb", "latency", "200ms"])  # fmt: skip

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
            must(["nsenter", f"--net=/run/netns/{end}", "iptables", "-F", "INPUT"])

    def down(self) -> None:
        must(["ip", "-n", self.device, "link", "set", "cable", "down"])

    def up(self) -> None:
        must(["ip", "-n", self.device, "link", "set", "cable", "up"])

    def arrived(self) -> int:
        """Bytes that the device's end has taken in."""
        said = must(["ip", "-n", self.device, "-json", "-stats", "link", "show", "cable"])
        return json.loads(said)[0]["stats64"]["rx"]["bytes"]

    def _rule(self, end: str, *rule: str) -> None:
        # -I: the newest rule comes first; before the first one there is none at all
        done = run(["nsenter", f"--net=/run/netns/{end}", "iptables", "-I", "INPUT", *rule])
        if done.returncode != 0:
            absent(f"the kernel has no such packet filter: {done.stderr.strip()}")


def run(argv: list) -> subprocess.CompletedProcess:
    return subprocess.run([str(a) for a in argv], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def must(argv: list) -> str:
    done = run(argv)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


@pytest.fixture
def link():
    """A cable between two namespaces that are there for this test only."""
    require_root()
    for program in ("ip", "tc", "iptables"):
        if shutil.which(program) is None:
            absent(f"{program} is not installed (Debian: iproute2, iptables)")
    mark = f"eo-{os.getpid():x}-{secrets.token_hex(3)}"
    ends = Link(f"{mark}-h", f"{mark}-d")
    with contextlib.ExitStack() as stack:
        for end in (ends.host, ends.device):
            made = run(["ip", "netns", "add", end])
            if made.returncode != 0:
                absent(f"no network namespace can be made: {made.stderr.strip()}")
            stack.callback(run, ["ip", "netns", "del", end])
        must(["ip", "-n", ends.host, "link", "add", "cable", "type", "veth"]
             + ["peer", "name", "cable", "netns", ends.device])  # fmt: skip
        for end, address in ((ends.host, HOST), (ends.device, DEVICE)):
            must(["ip", "-n", end, "address", "add", f"{address}/24", "dev", "cable"])
            must(["ip", "-n", end, "link", "set", "lo", "up"])
            must(["ip", "-n", end, "link", "set", "cable", "up"])
        yield ends


@pytest.fixture
def machine(link, loopback, tmp_path):
    """machine(**options): a device at the far end of `link`."""
    with contextlib.ExitStack() as stack:

        def start(**options) -> Machine:
            made = Machine(
                tmp_path / f"machine-{secrets.token_hex(3)}", loopback.find_sshd(), address=DEVICE, net=link.device,
                port=22, **options,
            )  # fmt: skip
            stack.callback(made.down)
            return made.up()

        yield start


@dataclass
class Edgeopt:
    """A command of edgeopt at the host's end, running."""

    child: subprocess.Popen
    started: float

    def end(self, within_s: float = 120) -> Ended:
        """Wait for it; a command that outlasts the deadline fails the test and is killed."""
        try:
            out, err = self.child.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.communicate()
            pytest.fail(f"edgeopt was still at work after {within_s:g} s")
        return Ended(self.child.returncode, json.loads(out or "{}"), err, time.monotonic() - self.started)


@dataclass(frozen=True)
class Ended:
    status: int
    said: dict
    stderr: str
    seconds: float


@pytest.fixture
def edgeopt(link):
    """edgeopt(*ARGS): start a command at the host's end."""
    with contextlib.ExitStack() as stack:

        def start(*args) -> Edgeopt:
            argv = ["nsenter", f"--net=/run/netns/{link.host}", sys.executable, "-m", "edgeopt", *map(str, args)]
            child = subprocess.Popen(
                argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            stack.enter_context(child)
            stack.callback(child.kill)
            return Edgeopt(child, time.monotonic())

        yield start
