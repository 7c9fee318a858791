"""The devices that flows are tried on: a real OpenSSH server on loopback, and this machine."""

from __future__ import annotations

import pytest

from edgeopt.ports.connect import connect
from tests.machine import Machine, require_root


@pytest.fixture(params=["ssh", "local"])
def device(request, sshd, ssh_config):
    host, config = ("device", ssh_config(sshd)) if request.param == "ssh" else (None, None)
    with connect(host, config=config) as connection:
        yield connection


@pytest.fixture
def root(tmp_path):
    return tmp_path / "it's the root"


@pytest.fixture
def odd(loopback, tmp_path):
    """odd(**options): a started machine; see tests/machine.py."""
    require_root()
    made = []

    def start(**options) -> Machine:
        made.append(Machine(tmp_path / f"machine{len(made)}", loopback.find_sshd(), **options))
        return made[-1].up()

    yield start
    for machine in made:
        machine.down()
