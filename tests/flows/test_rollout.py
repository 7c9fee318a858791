"""Rollouts to a small fleet of real sshds: waves, halting, taking back, and devices that are not well."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from edgeopt.errors import LockedError, RolloutError, UsageError
from edgeopt.flows.place import locked
from edgeopt.flows.rollout import Options, make_plan, resume, rollout
from edgeopt.flows.rollout_journal import FOLDER, folder_beside, only_one
from tests.conftest import absent
from tests.fleet import Fleet, states, version

ALL_AT_ONCE = {"canary": 0, "waves": "100%"}


def events(done) -> list[dict]:
    return [json.loads(line) for line in (done.folder / "journal.jsonl").read_text().splitlines()]


def begun(done) -> list[str]:
    return [e["device"] for e in events(done) if e["event"] == "device" and e["state"] == "begun"]


def test_waves_in_order_a_report_a_device_and_nothing_deployed_twice(fleet, tmp_path):
    artifact = version(tmp_path, 1)
    done = fleet.roll(artifact, canary=1, waves="50%,100%")
    assert done.result == "done" and set(states(done).values()) == {"active"}
    assert {fleet.current(name) for name in fleet.names} == {artifact.digest}
    assert done.plan.waves == (("d0",), ("d1",), ("d2", "d3")) and begun(done)[:2] == ["d0", "d1"]
    # no device of a wave is begun before the one before it has passed
    order = [e["event"] if e["event"] == "wave" else e["device"] for e in events(done)[1:-1]]
    assert order.index("d1") > order.index("wave") and order.index("d2") > order.index("wave", order.index("d1"))
    for row in done.as_dict()["devices"]:
        report = json.loads(Path(row["report"]).read_text())
        assert report["report"]["verdict"] == "pass" and report["report"]["host"].endswith(
            str(fleet.servers[int(row["name"][1])].port)
        )
    assert not list((done.folder / "work").iterdir())
    json.dumps(done.as_dict(), allow_nan=False)
    done.check()
    again = fleet.roll(artifact)
    assert again.result == "done" and all(o.kept for o in again.outcomes.values()) and begun(again) == []


def test_each_device_gets_its_own_selection(fleet, tmp_path):
    fleet.roll(version(tmp_path, 1), **ALL_AT_ONCE)
    for name, server in zip(fleet.names, fleet.servers, strict=True):
        selection = json.loads((fleet.root(name) / "tiny" / "current" / "selection.json").read_text())
        assert selection["where"].endswith(f":{server.port}")
    assert not (tmp_path / "v1" / "tiny.edgeopt" / "selection.json").exists()


@pytest.mark.parametrize("undo", ["wave", "rollout", "none"])
def test_a_wave_that_fails_goes_back_to_what_each_device_ran(fleet, tmp_path, undo):
    old, new, other = (version(tmp_path, number) for number in (1, 2, 3))
    fleet.hold(other, old)
    fleet.hold(other, names=["d3"])  # one of them runs something else than the others
    before = {name: fleet.links(name) for name in fleet.names}
    fleet.make_ill("d1")
    done = fleet.roll(new, canary=1, waves="100%", undo=undo)
    assert done.result == "halted" and "d1" in done.reason
    taken = {"wave": ["d2", "d3"], "rollout": ["d0", "d2", "d3"], "none": []}[undo]
    for name in fleet.names:
        if name in taken:
            assert done.outcomes[name].state == "rolled back"
        if name in (*taken, "d1"):
            assert fleet.links(name) == before[name], name
        else:
            assert fleet.current(name) == new.digest
    assert done.outcomes["d1"].state == "failed"
    with pytest.raises(RolloutError, match="halted"):
        done.check()
    with pytest.raises(UsageError, match="taken back"):
        resume(folder_beside(new.folder), "tiny", done.plan.id, fleet.tools())


def test_devices_that_ran_nothing_run_nothing_again_and_others_are_not_begun(fleet, tmp_path):
    fleet.make_ill("d1")
    done = fleet.roll(version(tmp_path, 1), canary=0, waves="100%", pace={"jobs": 1})
    assert states(done) == {"d0": "rolled back", "d1": "failed", "d2": "waiting", "d3": "waiting"}
    assert [fleet.current(name) for name in fleet.names] == [None] * 4 and begun(done) == ["d0", "d1"]


def test_so_many_failures_may_be_and_are_named(fleet, tmp_path):
    fleet.make_ill("d1")
    done = fleet.roll(version(tmp_path, 1), max_failures=1, **ALL_AT_ONCE)
    assert done.result == "incomplete" and done.reason == "failed: d1"
    assert [fleet.current(name) is None for name in fleet.names] == [False, True, False, False]
    with pytest.raises(RolloutError, match="failed: d1"):
        done.check()


def test_one_that_was_switched_by_somebody_else_is_left_and_one_whose_release_is_gone_is_named(fleet, tmp_path):
    old, new, other = (version(tmp_path, number) for number in (1, 2, 3))
    fleet.hold(other, old)
    plan = make_plan([new], fleet.devices(), Options(**ALL_AT_ONCE))

    class Meddler(type(fleet.tools().watch)):
        def say(self, text):
            if text.startswith("taking"):
                fleet.hold(other, names=["d2"])
                shutil.rmtree(fleet.root("d3") / "tiny" / "releases" / old.digest)

    fleet.make_ill("d1")
    done = rollout(plan, folder_beside(new.folder), fleet.tools(Meddler()))
    assert states(done) == {"d0": "rolled back", "d1": "failed", "d2": "left", "d3": "not rolled back"}
    assert "not taken back: d3" in done.reason and fleet.current("d2") == other.digest


@pytest.fixture
def unwell(loopback, four_sshds, tmp_path):
    """d0 well, d1 offline, d2 frozen, d3 with a full disk, d4 too slow for its artifact's limit."""
    frozen, slow = tmp_path / "frozen", tmp_path / "slow"
    with contextlib.ExitStack() as stack:
        stack.callback(loopback.down, frozen)
        stack.callback(loopback.down, slow)
        servers = [four_sshds[0], four_sshds[1], loopback.up(frozen), four_sshds[3], loopback.up(slow)]
        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))
        fleet = Fleet(servers, tmp_path, {"d1": unused.getsockname()[1]})
        fleet.root("d3").mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(fleet.root("d3"))]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            absent("mounting a small tmpfs needs root")
        stack.callback(subprocess.run, ["umount", "-l", str(fleet.root("d3"))], check=True)
        os.kill(servers[2].pid, signal.SIGSTOP)
        stack.callback(os.kill, servers[2].pid, signal.SIGCONT)
        yield fleet


def test_no_devices_error_is_anothers_and_those_not_reached_are_taken_up_later(unwell, tmp_path):
    artifact, strict = version(tmp_path, 1), version(tmp_path, 2, limits={"latency_ms": 1e-6})
    devices = unwell.devices(d4={"artifact": str(strict.folder)})
    done = unwell.roll(artifact, devices, max_failures=2, pace={"jobs": 5, "retries": 1}, **ALL_AT_ONCE)
    assert states(done) == {"d0": "active", "d1": "offline", "d2": "offline", "d3": "failed", "d4": "failed"}
    assert done.result == "incomplete" and "not reached: d1, d2" in done.reason and "failed: d3, d4" in done.reason
    errors = {name: o.error["error"] for name, o in done.outcomes.items() if o.error}
    assert errors == {"d1": "HostError", "d2": "HostError", "d3": "SpaceError", "d4": "ValidationError"}
    slow = json.loads((done.folder / "devices" / "d4.json").read_text())
    assert slow["report"]["verdict"] == "fail" and "latency_ms" in json.dumps(slow["report"]["checks"])
    os.kill(unwell.servers[2].pid, signal.SIGCONT)
    unwell.ports.clear()
    later = resume(folder_beside(artifact.folder), "tiny", "", unwell.tools())
    assert states(later) == {"d0": "active", "d1": "active", "d2": "active", "d3": "failed", "d4": "failed"}
    assert begun(later).count("d0") == 1 and later.plan == done.plan


def test_a_wave_that_nobody_took_proves_nothing_and_goes_on_later(fleet, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        fleet.ports["d0"] = unused.getsockname()[1]
        done = fleet.roll(version(tmp_path, 1))
    assert done.result == "unproven" and states(done)["d1"] == "waiting" and fleet.current("d1") is None
    fleet.ports.clear()
    assert resume(done.folder.parent, "tiny", done.plan.id, fleet.tools()).result == "done"


def test_offline_counts_where_that_is_asked_for(fleet, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        fleet.ports["d1"] = unused.getsockname()[1]
        done = fleet.roll(version(tmp_path, 1), count_offline=True, **ALL_AT_ONCE)
    assert done.result == "halted" and states(done)["d1"] == "offline" and fleet.current("d0") is None


def test_one_that_is_locked_is_tried_again_and_is_no_failure(fleet, tmp_path):
    artifact = version(tmp_path, 1)
    with (
        fleet.tools().reach("d1") as connection,
        locked(connection, str(fleet.root("d1")), "tiny"),
    ):
        done = fleet.roll(artifact, pace={"retries": 1}, **ALL_AT_ONCE)
    assert states(done)["d1"] == "busy" and done.result == "incomplete"
    assert resume(folder_beside(artifact.folder), "tiny", "", fleet.tools()).result == "done"


def test_after_the_soak_what_fell_ill_goes_back_and_its_wave_with_it(fleet, tmp_path):
    old, new = version(tmp_path, 1, health=()), version(tmp_path, 2)
    fleet.hold(old)

    class Falls(type(fleet.tools().watch)):
        def say(self, text):
            if text.startswith("soaking"):
                fleet.make_ill("d1")

    plan = make_plan([new], fleet.devices(), Options(canary=2, waves="100%", soak_s=0.01))
    done = rollout(plan, folder_beside(new.folder), fleet.tools(Falls()))
    assert states(done) == {"d0": "rolled back", "d1": "failed", "d2": "waiting", "d3": "waiting"}
    assert done.result == "halted" and {fleet.current(name) for name in fleet.names} == {old.digest}
    assert "runs" in done.outcomes["d1"].what


def test_a_second_rollout_of_the_name_is_refused_and_an_artifact_that_was_rebuilt(fleet, tmp_path):
    artifact = version(tmp_path, 1)
    plan = make_plan([artifact], fleet.devices())
    folder = folder_beside(artifact.folder)
    with only_one(folder, "tiny"), pytest.raises(LockedError, match=f"process {os.getpid()}"):
        rollout(plan, folder, fleet.tools())
    assert folder == tmp_path / "v1" / FOLDER
    fleet.make_ill("d0")
    done = fleet.roll(artifact, max_failures=1)
    other = version(tmp_path, 2)
    shutil.rmtree(artifact.folder)
    os.rename(other.folder, artifact.folder)
    with pytest.raises(UsageError, match="not the one"):
        resume(folder, "tiny", done.plan.id, fleet.tools())
