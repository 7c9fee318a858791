"""Crashes at every named point of push and activate: the old release runs, and the next push finishes the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt import digest
from edgeopt.errors import EdgeoptError, LockedError
from edgeopt.flows.activate import activate
from edgeopt.flows.place import locked
from edgeopt.flows.push import push
from edgeopt.flows.status import collect, status
from edgeopt.ports.connect import connect
from edgeopt.runtime.artifact import Artifact
from tests.conftest import wait_until
from tests.crash_points import DEVICE_POINTS, OPERATOR_POINTS, Device
from tests.tiny import tiny_artifact

WEIGHTS_BYTES = 400_000


@pytest.fixture(scope="module")
def shims(tmp_path_factory):
    return Device(tmp_path_factory.mktemp("shims"))


@pytest.fixture(scope="module")
def dying(loopback, shims, tmp_path_factory):
    """A server whose programs may end everything."""
    folder = tmp_path_factory.mktemp("dying-sshd")
    yield loopback.up(folder, settings=(shims.settings,))
    loopback.down(folder)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """(a root, the artifact that is current there, the next one); one more release is to be pruned."""
    folder = tmp_path_factory.mktemp("before")
    weights = {"weights.bin": os.urandom(WEIGHTS_BYTES)}
    says = ("sh", "-c", "echo old >> ../../log")
    oldest = tiny_artifact(folder / "0", torchscript=False, metrics={"reference": {"accuracy": 0.1}})
    old = tiny_artifact(folder / "1", torchscript=False, after_activate=says)
    new = tiny_artifact(
        folder / "2", torchscript=False, extra=weights, health=("crashpoint", "health"),
        after_activate=("sh", "-c", "crashpoint after_activate; echo new >> ../../log", "after_activate"),
    )  # fmt: skip
    with connect(None) as here:
        push(oldest, here, root=str(folder / "root"))
        push(old, here, root=str(folder / "root"))
        activate(here, "tiny", old.digest, root=str(folder / "root"))
    return folder / "root", old, new


@pytest.fixture
def root(before, tmp_path):
    """A copy of that root, hard links and all."""
    subprocess.run(["cp", "-a", before[0], tmp_path / "root"], check=True)
    return tmp_path / "root"


def current(root: Path) -> Artifact:
    """What an application would load; every file of it is hashed."""
    return Artifact.open(root / "tiny" / "current")


def nothing_partial_is_visible(root: Path) -> None:
    """Every blob is what its name says, and every release is whole."""
    for blob in (root / "blobs").rglob("*"):
        if blob.is_file() and not blob.name.endswith(".part"):
            assert digest.of_file(blob) == blob.name
    for release in (root / "tiny" / "releases").iterdir():
        if not release.name.startswith(".staging-"):
            assert Artifact.open(release).digest == release.name


def the_next_push_finishes(connection, root: Path, old: Artifact, new: Artifact) -> None:
    done = push(new, connection, root=str(root), keep=1)
    activate(connection, "tiny", new.digest, root=str(root))
    assert current(root).digest == new.digest == done.digest
    assert os.readlink(root / "tiny" / "previous") == f"releases/{old.digest}"
    assert sorted(os.listdir(root / "tiny" / "releases")) == sorted([old.digest, new.digest])
    found = status(connection, root=str(root))
    assert found.names[0].unproven is None and not any(left.kind == "staging" for left in found.leftovers)
    collect(connection, root=str(root))
    assert status(connection, root=str(root)).leftovers == ()
    nothing_partial_is_visible(root)


def is_free(root: Path) -> bool:
    try:
        with connect(None) as here, locked(here, str(root), "tiny", make=False):
            return True
    except LockedError:
        return False


@pytest.mark.parametrize("point", DEVICE_POINTS, ids=lambda point: point.name)
def test_a_device_that_dies(point, before, root, shims, dying, ssh_config):
    _, old, new = before
    config = ssh_config(dying)
    shims.arm(point)
    with connect("device", config=config) as connection, pytest.raises(EdgeoptError):
        push(new, connection, root=str(root), keep=1)
        activate(connection, "tiny", new.digest, root=str(root))
    assert shims.was_taken(), "the point was not reached"
    nothing_partial_is_visible(root)
    running = current(root).digest
    assert running == old.digest or point.switched
    with connect("device", config=config) as connection:
        found = status(connection, root=str(root)).names[0]
        assert [r.digest for r in found.releases if r.current] == [running]
        if running != old.digest and point.name != "settle:after":  # the next who takes the lock goes back
            assert found.unproven == new.digest
            with locked(connection, str(root), "tiny"):
                assert current(root).digest == old.digest
            assert (root / "tiny" / "log").read_text().splitlines()[-1] == "old"
            assert "never proven" in status(connection, root=str(root)).journal[-1].result
        the_next_push_finishes(connection, root, old, new)


@pytest.mark.parametrize(("step", "when"), OPERATOR_POINTS, ids=lambda part: part)
def test_an_operator_who_is_killed(step, when, before, root, dying, ssh_config):
    _, old, new = before
    config = ssh_config(dying)
    where = ["--root", str(root), "--ssh-config", str(config)]
    argv = ["push", str(new.folder), "device", "--keep", "1", *where, "--then"]
    argv += ["activate", str(new.folder), "device", *where]
    module = [sys.executable, "-m", "tests.crash_operator", step, when]
    operator = subprocess.run([*module, *argv], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert operator.returncode == -signal.SIGKILL, operator.stderr
    assert wait_until(lambda: is_free(root)), "the device did not notice that the operator has gone"
    nothing_partial_is_visible(root)
    proven = step == "settle"
    assert current(root).digest == (new.digest if proven else old.digest)
    if step in ("after_activate", "health"):  # what the new release had started is the old one's again
        assert (root / "tiny" / "log").read_text().splitlines() == ["old", "new", "old"]
    with connect("device", config=config) as connection:
        the_next_push_finishes(connection, root, old, new)
