"""Two network namespaces and a cable between them: edgeopt's process in one, a device in the other. Needs root."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import absent
from tests.machine import Machine, require_root
from tests.network import lab

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def link():
    """A cable between two namespaces that are there for this test only."""
    require_root()
    try:
        with lab.cable() as link:
            yield link
    except lab.Absent as why:
        absent(str(why))


@pytest.fixture
def far_link():
    """As `link`, and 100 ms there and back."""
    require_root()
    try:
        with lab.slow_cable(delay_ms=50) as link:
            yield link
    except lab.Absent as why:
        absent(str(why))


@pytest.fixture
def machine_at(loopback, tmp_path):
    """machine_at(LINK, **options): a device at the far end of a link."""
    with contextlib.ExitStack() as stack:

        def start(link, **options) -> Machine:
            made = Machine(
                tmp_path / f"machine-{secrets.token_hex(3)}", loopback.find_sshd(), address=lab.DEVICE, net=link.device,
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
def edgeopt_at():
    """edgeopt_at(LINK, *ARGS): start a command at the host's end."""
    with contextlib.ExitStack() as stack:

        def start(link, *args) -> Edgeopt:
            argv = lab.inside(link.host, sys.executable, "-m", "edgeopt", *map(str, args))
            child = subprocess.Popen(
                argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            stack.enter_context(child)
            stack.callback(child.kill)
            return Edgeopt(child, time.monotonic())

        yield start


@pytest.fixture
def machine(link, machine_at):
    return lambda **options: machine_at(link, **options)


@pytest.fixture
def edgeopt(link, edgeopt_at):
    return lambda *args: edgeopt_at(link, *args)
