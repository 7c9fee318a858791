"""The commands push, activate, rollback and deploy, as a user calls them: in a process, over SSH."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from edgeopt.flows.place import locked
from edgeopt.ports.connect import connect
from tests.tiny import tiny_artifact


@pytest.fixture
def artifact(tmp_path):
    return tiny_artifact(tmp_path / "built", torchscript=False, metrics={}, cases=())


@pytest.fixture
def edgeopt(sshd, ssh_config, tmp_path):
    """edgeopt(*args): the finished process; the device is reached as `device`, releases lie in `root`."""
    config = ssh_config(sshd)

    def call(*args, code: int = 0, config=config):
        argv = [sys.executable, "-m", "edgeopt", *args, "--ssh-config", config, "--root", tmp_path / "root"]
        done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr or "--debug" in args
        return done

    return call


def test_push_says_what_moved_and_where_it_lies(edgeopt, artifact, tmp_path, sshd):
    done = edgeopt("push", artifact.folder, "device")
    release = tmp_path / "root" / "tiny" / "releases" / artifact.digest
    assert f"pushed   tiny {artifact.digest[:12]}: " in done.stdout and "blobs moved" in done.stdout
    assert f"127.0.0.1:{sshd.port}:{release}" in done.stdout
    assert "already there, nothing moved" in edgeopt("push", artifact.folder, "device").stdout


def test_json_is_one_document_on_stdout(edgeopt, artifact):
    pushed = json.loads(edgeopt("push", artifact.folder, "device", "--json").stdout)
    assert pushed["digest"] == artifact.digest and pushed["moved_bytes"] > 0 and pushed["seconds"] > 0
    assert json.loads(edgeopt("activate", artifact.folder, "device", "--json").stdout)["changed"] is True
    failed = edgeopt("rollback", "tiny", "device", "--json", code=15)
    assert json.loads(failed.stdout)["error"] == "DeviceError"


def test_activate_and_rollback_by_artifact_and_by_name(edgeopt, artifact, tmp_path):
    other = tiny_artifact(tmp_path / "other", torchscript=False, metrics={}, cases=(), profile="arm64-cpu")
    for folder in (artifact.folder, other.folder):
        edgeopt("push", folder, "device")
    edgeopt("activate", artifact.folder, "device")
    assert (
        "previous " + artifact.digest[:12]
        in edgeopt("activate", "tiny", "device", "--release", other.digest[:8]).stdout
    )
    edgeopt("rollback", other.folder, "device")
    assert os.readlink(tmp_path / "root" / "tiny" / "current") == f"releases/{artifact.digest}"
    edgeopt("activate", "tiny", "device", code=2)  # which one is not clear


def test_without_host_this_machine_is_the_device(edgeopt, artifact, tmp_path):
    assert "this machine:" in edgeopt("push", artifact.folder).stdout
    edgeopt("activate", artifact.folder)
    assert (tmp_path / "root" / "tiny" / "current" / "manifest.json").is_file()


def test_deploy_shows_push_report_and_activation(edgeopt, artifact, tmp_path):
    done = edgeopt("deploy", artifact.folder, "device", "--python", sys.executable)
    for word in ("pushed   tiny", "onnxruntime-fp32", "report   ", "active   tiny"):
        assert word in done.stdout
    data = json.loads(edgeopt("deploy", artifact.folder, "device", "--python", sys.executable, "--json").stdout)
    assert data["report"]["verdict"] == "pass" and data["pushed"]["already_there"] is True


@pytest.mark.parametrize("command", ["push", "activate", "rollback", "deploy"])
def test_every_command_reads_the_ssh_config_and_refuses_an_unknown_host(
    edgeopt, artifact, ssh_config, sshd, tmp_path, command
):
    unknown = ssh_config(sshd, "unknown", UserKnownHostsFile=tmp_path / "none", HostKeyAlias=None)
    done = edgeopt(command, artifact.folder, "device", code=12, config=unknown)
    assert "SHA256:" in done.stderr and "next:" in done.stderr and done.stdout == ""


def test_a_port_where_nothing_listens(edgeopt, artifact, ssh_config, sshd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = ssh_config(sshd, "dead", Port=unused.getsockname()[1])
        assert "nothing listens" in edgeopt("push", artifact.folder, "device", code=11, config=dead).stderr


def test_accept_new_host_key_goes_on_and_says_so(edgeopt, artifact, ssh_config, sshd, tmp_path):
    config = ssh_config(sshd, "unknown", UserKnownHostsFile=tmp_path / "new", HostKeyAlias=None)
    done = edgeopt("push", artifact.folder, "device", "--accept-new-host-key", config=config)
    assert "new host key SHA256:" in done.stderr and (tmp_path / "new").exists()


def test_a_locked_device_an_artifact_that_is_none_and_one_that_is_broken(edgeopt, artifact, tmp_path):
    with locked(connect(None), str(tmp_path / "root"), "tiny"):
        assert f"process {os.getpid()}" in edgeopt("push", artifact.folder, "device", code=17).stderr
    edgeopt("push", tmp_path / "none", "device", code=10)
    edgeopt("activate", "no such name!", "device", code=2)
    edgeopt("push", artifact.folder, "-bad host", code=2)
    (artifact.folder / "float.onnx").write_bytes(b"")
    assert "float.onnx" in edgeopt("push", artifact.folder, "device", code=10).stderr


def test_debug_shows_the_traceback(sshd, ssh_config, tmp_path):
    argv = [sys.executable, "-m", "edgeopt", "--debug", "push", tmp_path / "none"]
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
    assert "Traceback" in done.stderr
