"""`edgeopt prepare` as a user calls it: in a process, over SSH, with a recorded trtexec on the device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import wait_until
from tests.tensorrt_device import install, with_engines


@pytest.fixture
def edgeopt(start_sshd, ssh_config, tmp_path):
    """edgeopt(*args): the argv of the process; the device `device` has a recorded trtexec."""
    found = install(tmp_path / "jetson")
    config = ssh_config(start_sshd("device", f"SetEnv PATH={found}:/usr/bin:/bin"))

    def argv(command: str, artifact, *args) -> list[str]:
        words = [sys.executable, "-m", "edgeopt", command, artifact.folder, "device", "--ssh-config", config, *args]
        return [str(word) for word in (*words, "--root", tmp_path / "root", "--python", sys.executable)]

    return argv


def call(argv: list[str], code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done


def test_it_shows_each_engine_and_that_all_is_simulated(edgeopt, tmp_path):
    artifact = with_engines(tmp_path / "built")
    shown = call(edgeopt("prepare", artifact)).stdout
    assert (
        shown.startswith("SIMULATED: recorded lines of trtexec") and "engine   tensorrt-fp16: ready, built in" in shown
    )
    data = json.loads(call(edgeopt("prepare", artifact, "--json")).stdout)
    assert data["engines"][0]["status"] == "ready" and data["simulated"] and data["failure"] is None


def test_an_engine_that_cannot_be_built_is_an_error_with_what_to_do(edgeopt, tmp_path):
    artifact = with_engines(tmp_path / "built")
    install(tmp_path / "jetson", fail="operator")
    failed = call(edgeopt("prepare", artifact), code=15).stderr
    assert "this TensorRT has no operator Round" in failed and "/log on the device" in failed


def test_ctrl_c_ends_the_command_and_not_the_build(edgeopt, tmp_path):
    artifact = with_engines(tmp_path / "built")
    install(tmp_path / "jetson", until=str(tmp_path / "go on"))
    asking = subprocess.Popen(edgeopt("prepare", artifact), stderr=subprocess.PIPE, text=True)
    shown = next(line for line in asking.stderr if line.startswith("tensorrt-fp16: "))  # it waits from here on
    asking.send_signal(signal.SIGINT)
    said = shown + asking.communicate(timeout=60)[1]
    assert asking.returncode == 130 and "edgeopt prepare ARTIFACT HOST" in said
    assert wait_until(lambda: any(tmp_path.glob("root/engines/*/log")), 60)
    builder = next(iter(json.loads(p.read_text()) for p in tmp_path.glob("root/engines/*/state.json")))["process"][
        "pid"
    ]
    os.kill(builder, 0)
    (tmp_path / "go on").touch()
    assert "ready, built in" in call(edgeopt("prepare", artifact)).stdout


def test_an_unknown_candidate_is_refused(edgeopt, tmp_path):
    artifact = with_engines(tmp_path / "built", cpu=True)
    assert "no candidate 'int9'" in call(edgeopt("prepare", artifact, "--candidate", "int9"), code=10).stderr
    wrong = call(edgeopt("prepare", artifact, "--candidate", "onnxruntime-fp32"), code=2).stderr
    assert "is no TensorRT candidate" in wrong and "choose one of: tensorrt-fp16" in wrong
