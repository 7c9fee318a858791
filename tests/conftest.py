"""Fixtures of the tests: a real OpenSSH server on loopback, and what it takes to reach it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pkgutil
import random
import sys
import time
from pathlib import Path

import hypothesis
import pytest

from edgeopt.errors import EdgeoptError

SCRIPTS = Path(__file__).parents[1] / "scripts"


# Tests never fail for being slow: the first text that hypothesis draws takes seconds on a busy machine.
hypothesis.settings.register_profile(
    "edgeopt", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("edgeopt")


def pytest_collectstart(collector):
    """Modules of tests make the same random models at import in whichever order and worker they are imported."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test draws the same random numbers alone, in its file, and in the whole suite."""
    _seed()


def _seed() -> None:
    random.seed(0)
    for name, seed in (("numpy", "numpy.random.seed"), ("torch", "torch.manual_seed")):
        if name in sys.modules:  # a test that needs neither stays quick
            pkgutil.resolve_name(seed)(0)


def absent(reason: str) -> None:
    """A component is not here: a skip on a person's machine, a failure in CI, where everything is installed."""
    if os.environ.get("CI"):
        pytest.fail(f"in CI this must be there: {reason}")
    pytest.skip(reason)


def wait_until(condition, within_s: float = 60) -> bool:
    """True as soon as `condition()` holds, False where it does not within `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture(scope="session")
def loopback():
    """The module scripts/loopback_sshd.py."""
    spec = importlib.util.spec_from_file_location("loopback_sshd", SCRIPTS / "loopback_sshd.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if module.find_sshd() is None:
        absent("sshd is not installed (Debian: openssh-server)")
    return module


@pytest.fixture(scope="session")
def sshd(loopback, tmp_path_factory):
    """A running server with plain settings, shared by all tests; its users' home is `sshd.home`."""
    folder = tmp_path_factory.mktemp("sshd")
    yield loopback.up(folder)
    loopback.down(folder)


@pytest.fixture
def start_sshd(loopback, tmp_path):
    """start_sshd(NAME, *settings): another server, stopped after the test."""
    with contextlib.ExitStack() as stack:

        def start(name: str, *settings: str):
            folder = tmp_path / name
            stack.callback(loopback.down, folder)
            return loopback.up(folder, settings=settings)

        yield start


@pytest.fixture(scope="session")
def four_sshds(loopback, tmp_path_factory):
    """Four more servers of that kind: a fleet."""
    folders = [tmp_path_factory.mktemp(f"device{at}") for at in range(4)]
    with contextlib.ExitStack() as stack:
        for folder in folders:
            stack.callback(loopback.down, folder)
        yield [loopback.up(folder) for folder in folders]


@pytest.fixture
def fleet(four_sshds, tmp_path):
    """The Fleet of those four, each with a root of its own for this test."""
    from tests.fleet import Fleet

    return Fleet(list(four_sshds), tmp_path)


@pytest.fixture
def ssh_config(tmp_path):
    """ssh_config(sshd, **options): an ssh_config whose host `device` is that server, with options replaced."""

    def write(server, name: str = "ssh_config", **options) -> Path:
        settings = {
            "HostName": "127.0.0.1",
            "Port": server.port,
            "HostKeyAlias": f"[127.0.0.1]:{server.port}",
            "IdentityFile": server.folder / "client_key",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": server.known_hosts,
            "GlobalKnownHostsFile": "none",
            **options,
        }
        lines = [f"  {key} {value}" for key, value in settings.items() if value is not None]
        path = tmp_path / name
        path.write_text("Host device\n" + "\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture(scope="session")
def virtual_jetson_cache():
    """The folder that keeps the arm64 root of `edgeopt.testing.virtual_device`; absent where there can be none."""
    from edgeopt.testing import arm64_root, virtual

    try:
        virtual.unavailable()
        arm64_root.arm64_root(arm64_root.default_cache())
    except EdgeoptError as why:
        absent(f"no virtual device here: {why.what}; {why.todo}")
    return arm64_root.default_cache()
