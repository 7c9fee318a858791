"""An engine is built once per equal passport in a rollout, and given to the others; every figure is simulated."""

from __future__ import annotations

import contextlib
import json

import pytest

from edgeopt.flows.rollout import Options, make_plan, rollout
from edgeopt.flows.rollout_journal import folder_beside
from tests.fleet import Fleet, states
from tests.tensorrt_device import install, with_engines

ONE_BY_ONE = {"jobs": 1}


@pytest.fixture
def jetsons(loopback, tmp_path):
    """jetsons(*settings): a Fleet in which each device has a recorded trtexec with these settings."""
    with contextlib.ExitStack() as stack:

        def start(*settings: dict) -> Fleet:
            servers = []
            for at, changes in enumerate(settings):
                path = install(tmp_path / f"jetson{at}", **changes)
                folder = tmp_path / f"sshd{at}"
                stack.callback(loopback.down, folder)
                servers.append(loopback.up(folder, settings=(f"SetEnv PATH={path}:/usr/bin:/bin",)))
            return Fleet(servers, tmp_path)

        yield start


def builds(fleet: Fleet, name: str) -> int:
    path = fleet.root(name) / "engines" / "history.json"
    return len(json.loads(path.read_text())) if path.exists() else 0


def engines(fleet: Fleet, name: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(fleet.root(name).glob("engines/*/state.json"))]


def test_the_first_of_an_equal_passport_builds_and_the_others_are_given_its_engine(jetsons, tmp_path):
    fleet = jetsons({}, {}, {"version": "8.6.3"})
    artifact = with_engines(tmp_path / "a", cases=())
    done = fleet.roll(artifact, canary=0, waves="100%", pace={"jobs": 3})
    assert set(states(done).values()) == {"active"}, done.outcomes
    assert (
        builds(fleet, "d0") + builds(fleet, "d1") == 1 and builds(fleet, "d2") == 1
    )  # another TensorRT, another engine
    assert len(list((done.folder / "engines").glob("*.plan"))) == 2
    assert [state["status"] for name in fleet.names for state in engines(fleet, name)] == ["ready"] * 3
    assert all(outcome.simulated for outcome in done.outcomes.values())
    assert all(row["simulated"] for row in done.as_dict()["devices"])


def test_an_engine_that_does_not_load_there_is_built_there(jetsons, tmp_path):
    """The second device's trtexec calls itself as the first's and refuses its file, as a real one may."""
    fleet = jetsons({}, {})
    tool = tmp_path / "jetson1" / "bin" / "trtexec"
    taken = tmp_path / "refused"
    plain = tool.read_text()
    refusing = f'*--loadEngine=*) [ -e {taken} ] || {{ touch {taken}; echo "&&&& FAILED"; exit 1; }};;'
    refusing = f'case "$*" in {refusing} esac\n'
    tool.write_text(plain.replace("#!/bin/sh\n", "#!/bin/sh\n" + refusing))
    done = fleet.roll(with_engines(tmp_path / "a", cases=()), canary=0, waves="100%", pace=ONE_BY_ONE)
    assert set(states(done).values()) == {"active"}, done.outcomes
    assert taken.exists() and builds(fleet, "d0") == 1 and builds(fleet, "d1") == 1


def test_an_engine_that_was_damaged_here_is_not_used(jetsons, tmp_path):
    fleet = jetsons({}, {})
    damaged = []

    class Damages(type(fleet.tools().watch)):
        def device(self, name, state, detail):
            if name == "d1" and state == "connecting":
                for plan in tmp_path.glob("a/rollouts/*/engines/*.plan"):
                    plan.write_bytes(b"x" * plan.stat().st_size)
                    damaged.append(plan)

    artifact = with_engines(tmp_path / "a", cases=())
    plan = make_plan([artifact], fleet.devices(), Options(canary=1, waves="100%"))
    done = rollout(plan, folder_beside(artifact.folder), fleet.tools(Damages()))
    assert damaged and set(states(done).values()) == {"active"}
    assert builds(fleet, "d0") == 1 and builds(fleet, "d1") == 1


def test_what_a_device_cannot_build_the_next_one_builds(jetsons, tmp_path):
    fleet = jetsons({"fail": "operator"}, {})
    done = fleet.roll(with_engines(tmp_path / "a", cases=(), cpu=True), canary=0, waves="100%", pace=ONE_BY_ONE)
    # the first runs another candidate
    assert set(states(done).values()) == {"active"}, done.outcomes
    assert [builds(fleet, name) for name in fleet.names] == [0, 1]
