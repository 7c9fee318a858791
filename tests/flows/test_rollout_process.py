"""A rollout's process that is killed, or interrupted, in the middle of a wave, and taken up again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import wait_until
from tests.fleet import version

# in ROOT/tiny/releases/DIGEST: says that it is asked, and answers once ROOT/go is there
BLOCKS = ("sh", "-c", "touch ../../../asked; until [ -e ../../../go ]; do sleep 0.05; done")


@pytest.fixture
def start(fleet):
    """start(*args): a process of `edgeopt rollout`; those that still run at the end are killed."""
    with contextlib.ExitStack() as stack:

        def run(*args, **options) -> subprocess.Popen:
            argv = [
                sys.executable,
                "-m",
                "edgeopt",
                "rollout",
                *args,
                "--ssh-config",
                fleet.config(),
                "--backoff",
                "0.1",
            ]
            child = subprocess.Popen(
                [str(a) for a in argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
            )  # fmt: skip
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield run


def go(fleet, *names: str) -> None:
    for name in names:
        fleet.root(name).mkdir(parents=True, exist_ok=True)
        (fleet.root(name) / "go").touch()


def asked(fleet, name: str) -> bool:
    return (fleet.root(name) / "asked").exists()


def journal(artifact) -> list[dict]:
    path = next((artifact.folder.parent / "rollouts").glob("*/journal.jsonl"))
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def is_active(artifact, name: str) -> bool:
    with contextlib.suppress(StopIteration):
        return any(e.get("device") == name and e.get("state") == "active" for e in journal(artifact))
    return False


def finished(child: subprocess.Popen, code: int) -> str:
    out, err = child.communicate(timeout=120)
    assert child.returncode == code, err
    return out


def test_killed_in_the_middle_of_a_wave_it_goes_on_and_deploys_nothing_that_is_proven_twice(fleet, start, tmp_path):
    artifact = version(tmp_path, 1, health=BLOCKS)
    go(fleet, "d0", "d2")
    child = start(artifact.folder, "--fleet", fleet.file(), "--waves", "3,100%", "--yes")
    assert wait_until(lambda: asked(fleet, "d1") and is_active(artifact, "d2"), 120), child.communicate(timeout=1)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    path = next((artifact.folder.parent / "rollouts").glob("*/journal.jsonl"))
    with path.open("ab") as f:
        f.write(b'{"event": "device", "device": "d1", "sta')  # what a power cut leaves of a line
    go(fleet, "d1", "d3")
    data = json.loads(finished(start(artifact.folder, "--resume", "--json"), 0))
    assert data["result"] == "done" and {d["state"] for d in data["devices"]} == {"active"}
    begun = [e["device"] for e in journal(artifact) if e.get("state") == "begun"]
    # the switch of d1 was not proven when its operator died, so it went back by itself and was deployed anew
    assert sorted(begun) == ["d0", "d1", "d1", "d2", "d3"]
    assert {fleet.current(name) for name in fleet.names} == {artifact.digest}
    # what was proven before the end was not known is proven by its report
    assert json.loads((path.parent / "devices" / "d1.json").read_text())["report"]["verdict"] == "pass"


def test_killed_before_its_device_was_healthy_that_device_goes_back(fleet, start, tmp_path):
    falls_ill = ("sh", "-c", "if [ -e ../../../sick ]; then exit 1; fi; " + BLOCKS[2])
    old, new = version(tmp_path, 1), version(tmp_path, 2, health=falls_ill)
    fleet.hold(old)
    child = start(new.folder, "--fleet", fleet.file(), "--yes")
    assert wait_until(lambda: asked(fleet, "d0"), 120), child.communicate(timeout=1)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert fleet.current("d0") == new.digest  # switched, and not proven
    (fleet.root("d0") / "sick").touch()
    go(fleet, *fleet.names)
    data = json.loads(finished(start(new.folder, "--resume", "--json"), 18))
    assert data["result"] == "halted" and data["devices"][0]["state"] == "failed"
    assert {d["state"] for d in data["devices"][1:]} == {"waiting"}
    assert {fleet.current(name) for name in fleet.names} == {old.digest}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_what_is_at_work_begins_nothing_and_goes_on(fleet, start, tmp_path, number):
    artifact = version(tmp_path, 1, health=BLOCKS)
    child = start(artifact.folder, "--fleet", fleet.file(), "--select", "rack=0", "--jobs", "1", "--yes")
    assert wait_until(lambda: asked(fleet, "d0"), 120), child.communicate(timeout=1)
    child.send_signal(number)
    line = ""
    while "interrupted" not in line:
        line = child.stderr.readline()
        assert line, "it ended without a word"
    go(fleet, *fleet.names)
    out = finished(child, 130)
    assert "interrupted" in out and fleet.current("d0") == artifact.digest and fleet.current("d2") is None
    assert "done" in finished(start(artifact.folder, "--resume"), 0)


def test_after_a_second_interruption_nobody_waits(fleet, start, tmp_path):
    artifact = version(tmp_path, 1, health=BLOCKS)
    child = start(artifact.folder, "--fleet", fleet.file(), "--select", "rack=0", "--yes")
    assert wait_until(lambda: asked(fleet, "d0"), 120), child.communicate(timeout=1)
    child.send_signal(signal.SIGINT)
    while "interrupted" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    finished(child, 130)
    go(fleet, *fleet.names)
    assert "done" in finished(start(artifact.folder, "--resume"), 0)
