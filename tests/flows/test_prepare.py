"""Prepare: engines are built on the device, whatever happens to the connection, once each, and then run there.

The device is a real sshd on loopback, or this machine, with a recorded trtexec; what it gives is marked simulated.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeopt.errors import DeviceError, UsageError
from edgeopt.flows import prepare as flow
from edgeopt.flows.activate import activate
from edgeopt.flows.deploy import deploy
from edgeopt.flows.place import locked
from edgeopt.flows.prepare import Prepared, in_words, prepare
from edgeopt.flows.push import push
from edgeopt.flows.validate import How, validate_at
from edgeopt.ports.connect import connect
from edgeopt.report.text import plain
from tests.conftest import wait_until
from tests.tensorrt_device import install, with_engines

QUICK = How(python=sys.executable, rounds=1, calls=3)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The folder of the recorded trtexec, which is first on this machine's PATH."""
    monkeypatch.setenv("PATH", f"{install(tmp_path / 'jetson')}:{os.environ['PATH']}")
    return tmp_path / "jetson"


@pytest.fixture
def here(bench):
    with connect(None) as connection:
        yield connection


@pytest.fixture
def over_ssh(tmp_path, start_sshd, ssh_config):
    """over_ssh(**settings of the stand-in): a connection to a device of its own."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            found = install(tmp_path / "jetson", **settings)
            start.server = start_sshd("device", f"SetEnv PATH={found}:/usr/bin:/bin")
            config = ssh_config(start.server)
            return stack.enter_context(connect("device", config=config))

        yield start


def build(artifact, connection, root: Path, **how) -> Prepared:
    return prepare(artifact, connection, root=str(root), python=sys.executable, **{"poll_s": 0.1, **how})


def engines_of(root: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(root.glob("engines/*/state.json"))]


def builds(root: Path) -> int:
    """How often trtexec built."""
    path = root / "engines" / "history.json"
    return len(json.loads(path.read_text())) if path.exists() else 0


def test_an_engine_is_built_marked_simulated_and_not_built_again(here, root, tmp_path):
    artifact = with_engines(tmp_path / "a", "tensorrt-fp16", "tensorrt-fp32", recipe={})
    done = build(artifact, here, root)
    done.check()
    assert [(e.candidate, e.status) for e in done.engines] == [("tensorrt-fp16", "ready"), ("tensorrt-fp32", "ready")]
    assert done.simulated and done.as_dict()["simulated"] == done.simulated
    # the two have one recipe but for their names: one engine serves both
    assert len(engines_of(root)) == 1 and builds(root) == 1
    again = build(artifact, here, root)
    assert [e.passport for e in again.engines] == [e.passport for e in done.engines] and builds(root) == 1
    assert list((root / "engines" / "timing").iterdir())


def sessions(server: int) -> list[int]:
    """The processes that an sshd has begun, one for each of its connections."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == server and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def test_over_ssh_it_goes_on_when_the_session_is_killed(over_ssh, root, tmp_path, monkeypatch):
    connection, go_on = over_ssh(until=str(tmp_path / "go on")), tmp_path / "go on"
    artifact = with_engines(tmp_path / "a")
    outcome = []
    monkeypatch.setattr(flow, "POLL_S", 0.1)
    waiting = threading.Thread(target=lambda: outcome.append(build(artifact, connection, root)), daemon=True)
    waiting.start()
    assert wait_until(lambda: any(s["status"] == "building" and s["share"] > 0.3 for s in engines_of(root)), 60)
    builder = engines_of(root)[0]["process"]["pid"]
    killed = sessions(over_ssh.server.pid)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not set(killed) & set(sessions(over_ssh.server.pid)), 60)
    assert Path(f"/proc/{builder}").exists() and engines_of(root)[0]["status"] == "building"
    go_on.touch()
    waiting.join(60)
    assert outcome and outcome[0].engines[0].status == "ready"  # it was reached anew
    assert builds(root) == 1


def test_asked_again_it_reports_and_does_not_build_twice(over_ssh, root, tmp_path):
    artifact, go_on = with_engines(tmp_path / "a"), tmp_path / "go on"
    first = build(artifact, over_ssh(until=str(go_on)), root, wait=False)
    assert first.pending
    with connect("device", config=tmp_path / "ssh_config") as another:
        assert wait_until(lambda: build(artifact, another, root, wait=False).engines[0].status == "building", 60)
        running = build(artifact, another, root, wait=False).engines[0]
        assert running.passport == first.engines[0].passport and running.elapsed_s > 0
        go_on.touch()
        done = build(artifact, another, root)
    assert done.engines[0].status == "ready" and builds(root) == 1


def test_ctrl_c_leaves_the_build_running_and_says_how_to_ask_again(here, bench, root, tmp_path, monkeypatch, caplog):
    install(bench, until=str(tmp_path / "go on"))
    artifact = with_engines(tmp_path / "a")
    asked = []

    def interrupted(*args):
        asked.append(args)
        raise KeyboardInterrupt

    with monkeypatch.context() as at_the_keyboard:
        at_the_keyboard.setattr(flow, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
        with pytest.raises(KeyboardInterrupt):
            build(artifact, here, root)
    assert asked and "edgeopt prepare" in caplog.text
    assert wait_until(lambda: any(s["status"] == "building" for s in engines_of(root)), 60)
    (tmp_path / "go on").touch()
    done = build(artifact, here, root)
    assert done.engines[0].status == "ready" and builds(root) == 1


def test_a_build_that_was_killed_is_told_from_one_that_runs_and_built_again(here, bench, root, tmp_path):
    install(bench, until=str(tmp_path / "never"))
    artifact = with_engines(tmp_path / "a")
    build(artifact, here, root, wait=False)
    assert wait_until(lambda: any(s["status"] == "building" for s in engines_of(root)), 60)
    os.kill(engines_of(root)[0]["process"]["pid"], signal.SIGKILL)
    with locked(here, str(root), "tiny") as place:
        (engine,) = flow.ask(
            here,
            sys.executable,
            f"{place.release(artifact.digest)}/onboard.pyz",
            "engines",
            f"{root}/engines",
            next(p.parent.name for p in root.glob("engines/*/state.json")),
        ).engines
    assert engine.status == "interrupted" and "ended from outside" in in_words(engine)
    install(bench)
    assert build(artifact, here, root).engines[0].status == "ready"


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"fail": "operator"}, "operator", "no operator Round"),
        ({"fail": "memory"}, "memory", "not enough memory"),
        ({"fail": "killed"}, "memory", "the system killed TensorRT's builder"),
    ],
)
def test_a_build_that_fails_says_why_in_one_sentence_and_may_be_asked_again(
    here, bench, root, tmp_path, settings, kind, words
):
    install(bench, **settings)
    artifact = with_engines(tmp_path / "a")
    done = build(artifact, here, root)
    (engine,) = done.engines
    assert engine.status == "failed" and engine.failure.kind == kind and words in engine.failure.message
    assert "\n" not in engine.failure.message
    with pytest.raises(DeviceError, match=words):
        done.check()
    assert not list(root.glob("engines/*/engine.plan*"))
    install(bench)
    assert build(artifact, here, root).engines[0].status == "ready"


def test_another_tensorrt_finds_no_engine_of_the_old_one_and_builds_its_own(here, bench, root, tmp_path):
    artifact = with_engines(tmp_path / "a")
    old = build(artifact, here, root).engines[0]
    install(bench, version="8.6.3")
    with locked(here, str(root), "tiny") as place:
        done = validate_at(place, artifact, QUICK)
    assert done.report.verdict == "undecided"
    assert "TensorRT was 8.5.2 and is 8.6.3; run 'edgeopt prepare" in done.report.reason
    assert "ersion tag" not in done.report.reason
    new = build(artifact, here, root).engines[0]
    assert new.status == "ready" and new.passport != old.passport


def test_an_engine_is_measured_and_its_figures_are_marked(here, root, tmp_path):
    artifact = with_engines(tmp_path / "a")
    build(artifact, here, root)
    with locked(here, str(root), "tiny") as place:
        done = validate_at(place, artifact, QUICK)
    (result,) = done.report.candidates
    assert result.failure is None and result.calls == 3 and result.p50_ms > 0 and result.sqnr_db > 90
    assert done.report.simulated and done.report.verdict == "undecided"
    assert "SIMULATED: recorded lines" in plain(done.report) and "tensorrt-fp16 (simulated)" in plain(done.report)
    assert done.selection.reason.startswith("SIMULATED (")
    assert not list(root.glob("engines/*/run-*"))


def test_what_was_measured_comes_before_what_was_simulated(here, root, tmp_path):
    artifact = with_engines(tmp_path / "a", cpu=True)
    build(artifact, here, root)
    with locked(here, str(root), "tiny") as place:
        done = validate_at(place, artifact, QUICK)
    assert done.selection.candidate == "onnxruntime-fp32" and "SIMULATED" not in done.selection.reason
    assert "tensorrt-fp16" not in done.selection.figures and done.report.simulated


def test_an_engine_that_is_not_prepared_says_what_to_run(here, root, tmp_path, caplog):
    artifact = with_engines(tmp_path / "a")
    with locked(here, str(root), "tiny") as place:
        done = validate_at(place, artifact, QUICK)
    assert done.report.verdict == "undecided" and "run 'edgeopt prepare ARTIFACT HOST'" in done.report.reason
    with here:
        activate(here, "tiny", root=str(root))
    assert "will not load: its engine is not built on this device: run 'edgeopt prepare" in caplog.text


def test_deploy_prepares_by_itself(over_ssh, root, tmp_path, monkeypatch):
    monkeypatch.setattr(flow, "POLL_S", 0.1)
    artifact = with_engines(tmp_path / "a")
    done = deploy(artifact, over_ssh(), QUICK, root=str(root))
    assert done.prepared.engines[0].status == "ready" and done.validated.report.simulated
    assert done.as_dict()["prepared"]["simulated"]
    assert os.readlink(root / "tiny" / "current") == f"releases/{artifact.digest}"


def test_an_engine_goes_with_the_last_release_that_has_its_file(here, root, tmp_path):
    old = with_engines(tmp_path / "old")
    stays = build(old, here, root).engines[0]
    other = with_engines(tmp_path / "other", name="engines", recipe={"flags": ()})  # as the folder is called
    build(other, here, root)  # of the same file
    for blob in root.glob(f"blobs/sha256/*/{old.manifest.files['float.onnx'].sha256}"):
        blob.unlink()
    assert push(other, here, root=str(root)).already_there
    now = build(other, here, root).engines[0]
    assert now.status == "ready" and not Path(stays.folder).exists()


def test_what_the_device_cannot_build_is_refused_before_the_build(here, bench, root, tmp_path):
    install(bench, version="11.0.0")
    done = build(with_engines(tmp_path / "a"), here, root)
    assert "TensorRT 11.0.0 is strongly typed only" in done.engines[0].failure.message and builds(root) == 0


def test_a_device_without_trtexec_is_told_what_to_install(here, root, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = build(with_engines(tmp_path / "a"), here, root)
    with pytest.raises(DeviceError, match="no trtexec on its PATH.*install TensorRT"):
        done.check()


def test_wrong_candidates_are_refused(here, root, tmp_path):
    with pytest.raises(UsageError, match="onnxruntime-fp32 is no TensorRT candidate"):
        build(with_engines(tmp_path / "a", cpu=True), here, root, candidates=("onnxruntime-fp32",))
    artifact = with_engines(tmp_path / "b", cpu=True, engine_recipes=())
    with pytest.raises(UsageError, match="no TensorRT candidate"):
        build(artifact, here, root)


def test_two_who_ask_at_once_get_one_build(here, bench, root, tmp_path):
    install(bench, until=str(tmp_path / "go on"))
    artifact = with_engines(tmp_path / "a")
    push(artifact, here, root=str(root))
    release = root / "tiny" / "releases" / artifact.digest
    argv = [sys.executable, str(release / "onboard.pyz"), "prepare", str(release)]
    with connect(None) as other:
        threads = [threading.Thread(target=c.run, args=(argv,)) for c in (here, other) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (tmp_path / "go on").touch()
    assert build(artifact, here, root).engines[0].status == "ready"
    time.sleep(0.3)  # a second builder that waited would begin now
    assert builds(root) == 1
