"""A push over links that are slow, lossy, down for a while or dead, to a device in another network namespace.

Whatever happens: it ends right, or with one error that names host and cause in time, and the next push resumes.
"""

from __future__ import annotations

import os
import time

import pytest

from edgeopt.runtime.artifact import Artifact
from tests.conftest import wait_until
from tests.network.lab import DEVICE
from tests.tiny import tiny_artifact

BIG_BYTES = 3_000_000
MBIT, SLOW_MBIT = 16, 4  # the big file takes 1.5 s, or 6 s where something is to happen meanwhile
# ssh's words for: give the device up after three seconds without a sign of life
IMPATIENT = {"ServerAliveInterval": 3, "ServerAliveCountMax": 1}
SETTLED_S = 60  # that a deadline of a few seconds is kept on a machine with other work


@pytest.fixture
def big(tmp_path):
    return make_big(tmp_path, BIG_BYTES)


def make_big(tmp_path, size_bytes):
    return tiny_artifact(tmp_path / "built", torchscript=False, extra={"weights.bin": os.urandom(size_bytes)})


def check(machine, artifact) -> None:
    """The device holds the artifact, byte for byte, and nothing half made."""
    releases = machine.home / ".edgeopt" / "tiny" / "releases"
    assert os.listdir(releases) == [artifact.digest]
    assert Artifact.open(releases / artifact.digest).digest == artifact.digest
    assert not list(machine.home.rglob("*.part"))


def nothing_visible(machine) -> bool:
    return os.listdir(machine.home / ".edgeopt" / "tiny" / "releases") == []


def push_until_free(edgeopt, artifact, config):
    """The next push, tried again while the device still believes in the one before."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        done = edgeopt("push", artifact.folder, "device", "--ssh-config", config, "--json").end()
        if done.status != 17 or time.monotonic() > deadline:
            assert done.status == 0, done.stderr
            return done.said


@pytest.mark.parametrize(
    ("size_bytes", "loss"),
    [
        (BIG_BYTES, None),
        (BIG_BYTES, ("--mode", "random", "--probability", "0.01")),
        (BIG_BYTES, ("--mode", "random", "--probability", "0.05")),
        # by chance one packet would be lost ten times in a row some day
        (BIG_BYTES // 4, ("--mode", "nth", "--every", "5", "--packet", "0")),
    ],
    ids=["rate", "1%", "5%", "20%"],
)
def test_a_slow_or_lossy_link_only_takes_longer(link, machine, edgeopt, tmp_path, size_bytes, loss):
    big = make_big(tmp_path, size_bytes)
    device = machine()
    link.rate(MBIT)
    if loss:
        link.lose(*loss)
    config = device.config(ConnectTimeout=60)
    done = edgeopt("push", big.folder, "device", "--ssh-config", config, "--json").end()
    assert done.status == 0, done.stderr
    assert done.said["moved_bytes"] > size_bytes and done.said["host"] == f"device@{DEVICE}:22"
    check(device, big)


def test_a_link_that_takes_longer_than_our_patience_for_what_is_on_its_way(link, machine, edgeopt, tmp_path):
    big = make_big(tmp_path, BIG_BYTES // 3)
    device = machine()
    link.rate(1.5)
    done = edgeopt("push", big.folder, "device", "--ssh-config", device.config(**IMPATIENT), "--json").end()
    assert done.status == 0, done.stderr
    check(device, big)


def test_a_far_device_only_takes_longer(far_link, machine_at, edgeopt_at, big):
    device = machine_at(far_link)
    done = edgeopt_at(far_link, "push", big.folder, "device", "--ssh-config", device.config(), "--json").end()
    assert done.status == 0, done.stderr
    check(device, big)


def test_a_link_that_is_down_for_three_seconds_is_waited_for(link, machine, edgeopt, big):
    device = machine()
    link.rate(SLOW_MBIT)
    pushing = edgeopt("push", big.folder, "device", "--ssh-config", device.config(), "--json")
    half_way(link, pushing)
    link.down()
    time.sleep(3)  # the outage itself
    link.up()
    link.rate(MBIT)
    done = pushing.end()
    assert done.status == 0, done.stderr
    check(device, big)


@pytest.mark.parametrize("fault", ["reset", "black hole", "frozen", "power cut"])
def test_a_push_that_is_cut_says_so_in_time_and_the_next_one_resumes(link, machine, edgeopt, big, fault):
    device = machine()
    link.rate(SLOW_MBIT)
    config = device.config(**IMPATIENT)
    pushing = edgeopt("push", big.folder, "device", "--ssh-config", config, "--json")
    half_way(link, pushing)
    {"reset": link.reset, "black hole": link.black_hole, "frozen": device.freeze, "power cut": device.power_cut}[
        fault
    ]()
    done = pushing.end(within_s=SETTLED_S)
    expected = {"reset": (13, "broke"), "power cut": (13, "broke")}.get(fault, (11, "fell silent"))
    assert done.status == expected[0] and expected[1] in done.stderr, done.stderr
    assert f"device@{DEVICE}:22" in done.stderr and "repeat" in done.stderr and "Traceback" not in done.stderr
    assert nothing_visible(device)
    link.heal()
    link.rate(MBIT)
    device.up() if fault == "power cut" else device.thaw()
    again = push_until_free(edgeopt, big, device.config())
    assert 0 < again["moved_bytes"] < BIG_BYTES  # it went on where the first one was
    check(device, big)


def half_way(link, pushing) -> None:
    assert wait_until(lambda: link.arrived() > BIG_BYTES / 6 or pushing.child.poll() is not None)
    assert pushing.child.poll() is None, pushing.child.communicate()[1]


def test_a_device_that_is_not_there_is_told_of_before_long(link, machine, edgeopt, big):
    device = machine()
    link.black_hole()
    config = device.config(ConnectTimeout=2)
    done = edgeopt("push", big.folder, "device", "--ssh-config", config).end(within_s=SETTLED_S)
    assert done.status == 11 and "cannot connect: no answer in time" in done.stderr and DEVICE in done.stderr
