"""Deploy: push, validate and activate on a real device; undone when one fails."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from edgeopt.errors import DeviceError, EdgeoptError, ValidationError
from edgeopt.flows.deploy import deploy
from edgeopt.flows.validate import How
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import Candidate
from tests.tiny import tiny_artifact

QUICK = How(python=sys.executable, rounds=1, calls=3, threads=1)
PLAIN = {"metrics": {}, "cases": (), "torchscript": False}


@pytest.fixture
def running(device, root, tmp_path):
    """The digest of a release that is current already."""
    artifact = tiny_artifact(tmp_path / "running", profile="x86-cpu", **PLAIN)
    return deploy(artifact, device, QUICK, root=str(root)).activated.digest


def current(root) -> str:
    return os.readlink(root / "tiny" / "current").removeprefix("releases/")


def other(tmp_path, **changes) -> Artifact:
    return tiny_artifact(tmp_path / "other", **{**PLAIN, "profile": "arm64-cpu", **changes})


def test_what_passes_is_current_and_selected_by_its_measurement(device, root, running, tmp_path):
    artifact = other(tmp_path)
    done = deploy(artifact, device, QUICK, root=str(root))
    assert done.validated.report.verdict == "pass" and done.validated.report.host == device.label
    assert current(root) == artifact.digest and done.activated.previous == running
    on_device = Artifact.open(root / "tiny" / "current")
    assert on_device.digest == artifact.digest
    assert on_device.selection().decided_by == "validate"
    assert set(done.as_dict()) == {"pushed", "prepared", "report", "activated"} and done.prepared is None
    json.dumps(done.as_dict(), allow_nan=False)


def test_what_fails_its_limits_stays_staged_and_is_not_active(device, root, running, tmp_path):
    artifact = other(tmp_path, limits={"latency_ms": 1e-6})
    with pytest.raises(ValidationError, match="1e-06 ms is asked for"):
        deploy(artifact, device, QUICK, root=str(root))
    assert current(root) == running
    assert Artifact.open(root / "tiny" / "releases" / artifact.digest)


def test_what_is_not_healthy_is_switched_back(device, root, running, tmp_path):
    artifact = other(tmp_path, health=("sh", "-c", "echo the camera is gone >&2; exit 1"))
    with pytest.raises(DeviceError, match="the camera is gone"):
        deploy(artifact, device, QUICK, root=str(root))
    assert current(root) == running


@pytest.mark.parametrize("python", ["without-runtimes", "no-such-python"])
def test_a_device_that_cannot_run_it_keeps_what_it_has(device, root, running, tmp_path, python):
    if python == "without-runtimes":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
        how = How(python=str(tmp_path / "bare" / "bin" / "python"), rounds=1, calls=3)
    else:
        how = How(python=python, rounds=1, calls=3)
    with pytest.raises(DeviceError) as failed:
        deploy(other(tmp_path), device, how, root=str(root))
    assert ("no-such-python" if python == "no-such-python" else "onnxruntime") in str(failed.value)
    assert current(root) == running


def test_the_device_is_locked_until_the_end(device, root, tmp_path):
    lock = root / "tiny" / "lock"
    artifact = other(tmp_path, health=("sh", "-c", f"! flock -n {shlex.quote(str(lock))} true"))
    deploy(artifact, device, QUICK, root=str(root))
    assert current(root) == artifact.digest


def test_what_was_deployed_already_is_measured_again(device, root, running, tmp_path):
    artifact = tiny_artifact(tmp_path / "again", profile="x86-cpu", **PLAIN)
    done = deploy(artifact, device, QUICK, root=str(root))
    assert done.pushed.already_there and not done.activated.changed and current(root) == running


def test_every_failure_says_what_to_do(device, root, tmp_path):
    with pytest.raises(EdgeoptError) as failed:
        deploy(other(tmp_path, limits={"latency_ms": 1e-6}), device, QUICK, root=str(root))
    assert failed.value.where and failed.value.todo
    assert not (root / "tiny" / "current").exists()


def test_what_no_runtime_there_can_run_is_unproven_and_not_active(device, root, running, tmp_path):
    engine = Candidate(name="tensorrt-fp16", runtime="tensorrt", precision="fp16", file="float.onnx")
    artifact = other(tmp_path, candidates=[engine])
    with pytest.raises(DeviceError, match="nothing is proven"):
        deploy(artifact, device, QUICK, root=str(root))
    assert current(root) == running
