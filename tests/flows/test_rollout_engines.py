"""An engine is built once per equal passport in a rollout, and given to the others; every figure is simulated."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

from edgeopt.flows.place import locked
from edgeopt.flows.rollout_engines import Engines
from edgeopt.progress import SILENT
from tests.fleet import Fleet, states
from tests.tensorrt_device import install, with_engines


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


def serve(fleet: Fleet, artifact, kept: Path, *names: str) -> None:
    """What a rollout does about engines for these devices, one after the other, without measuring anything."""
    kept.mkdir(exist_ok=True)
    for name in names:
        with (
            fleet.tools().reach(name) as connection,
            locked(connection, str(fleet.root(name)), "tiny") as place,
        ):
            Engines(kept).serve(place, artifact, sys.executable, 3, SILENT)


def test_an_engine_that_does_not_load_there_is_built_there(jetsons, tmp_path):
    """The second device's trtexec calls itself as the first's and refuses its file, as a real one may."""
    fleet = jetsons({}, {})
    tool, taken = tmp_path / "jetson1" / "bin" / "trtexec", tmp_path / "refused"
    refusing = f'*--loadEngine=*) [ -e {taken} ] || {{ touch {taken}; echo "&&&& FAILED"; exit 1; }};;'
    tool.write_text(tool.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\ncase "$*" in {refusing} esac\n'))
    serve(fleet, with_engines(tmp_path / "a"), tmp_path / "kept", "d0", "d1")
    assert taken.exists()
    assert [builds(fleet, name) for name in fleet.names] == [1, 0]
    assert [state["status"] for state in engines(fleet, "d1")] == []  # deploy's own prepare builds it
    serve(fleet, with_engines(tmp_path / "b"), tmp_path / "kept", "d1")
    assert [state["status"] for state in engines(fleet, "d1")] == ["ready"] and builds(fleet, "d1") == 0


def test_an_engine_that_was_damaged_here_is_not_used(jetsons, tmp_path):
    fleet, kept = jetsons({}, {}), tmp_path / "kept"
    serve(fleet, with_engines(tmp_path / "a"), kept, "d0")
    (plan,) = kept.glob("*.plan")
    whole = plan.read_bytes()
    plan.write_bytes(b"x" * len(whole))
    serve(fleet, with_engines(tmp_path / "b"), kept, "d1")
    assert engines(fleet, "d1") == [] and not list(fleet.root("d1").glob("engines/*/engine.plan"))
    plan.write_bytes(whole)
    serve(fleet, with_engines(tmp_path / "c"), kept, "d1")
    assert [state["status"] for state in engines(fleet, "d1")] == ["ready"] and builds(fleet, "d1") == 0


def test_what_a_device_cannot_build_the_next_one_builds(jetsons, tmp_path):
    fleet = jetsons({"fail": "operator"}, {})
    serve(fleet, with_engines(tmp_path / "a"), tmp_path / "kept", "d0", "d1")
    assert [builds(fleet, name) for name in fleet.names] == [0, 1]
    assert len(list((tmp_path / "kept").glob("*.plan"))) == 1
