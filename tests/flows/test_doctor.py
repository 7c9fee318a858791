"""Doctor on real servers: what is tried out on a device is found there, and nothing of it stays."""

from __future__ import annotations

import json
import os
import sys

import pytest

from edgeopt.errors import EdgeoptError
from edgeopt.flows.doctor import Asked, doctor
from edgeopt.flows.place import locked
from edgeopt.ports.connect import connect
from edgeopt.spec.profile import load_profile
from tests.small_project import run_edgeopt
from tests.tiny import tiny_artifact


def look(config, **asked):
    """Findings of the device by name."""
    with connect("device", config=config) as connection:
        done = doctor(connection, Asked(host="device", **{"python": sys.executable, **asked}))
    return {f.name: f for f in done.findings if f.where == "device"}


def test_a_device_in_order_passes_and_is_left_as_it_was(sshd, ssh_config, tmp_path):
    root = tmp_path / "its root"
    root.mkdir()
    found = look(ssh_config(sshd), root=str(root))
    assert found["reachable"].verdict == "ok"
    for name in ("sessions", "lock", "rename", "hash", "root folder", "tmp folder", "python", "clock"):
        assert found[name].verdict == "ok", found[name]
    assert list(root.iterdir()) == []


def test_a_root_that_is_not_there_yet_is_tried_where_it_will_be(sshd, ssh_config, tmp_path):
    found = look(ssh_config(sshd), root=str(tmp_path / "a" / "b"))
    assert found["root folder"].verdict == "ok" and found["root folder"].sentence.startswith(str(tmp_path / "a" / "b"))
    assert list(tmp_path.glob("a*")) == []


def test_a_folder_that_refuses_files_is_told(sshd, ssh_config):
    found = look(ssh_config(sshd), root="/proc/edgeopt")  # nobody makes files there, root neither
    assert found["root folder"].verdict == "fail" and "below /proc" in found["root folder"].sentence
    assert found["lock"].verdict == "ok"  # tried in the temporary folder


def test_what_is_said_of_sessions_is_what_a_push_meets(start_sshd, ssh_config, tmp_path):
    config = ssh_config(start_sshd("one", "MaxSessions 1"))
    found = look(config)
    try:
        with connect("device", config=config) as connection, locked(connection, str(tmp_path / "root"), "x") as place:
            place.state()
        works = True
    except EdgeoptError:
        works = False
    if works:
        assert found["sessions"].verdict == "ok"
    else:  # a server that has not taken the last session back refuses the next command already
        assert "fail" in (found["sessions"].verdict, found["reachable"].verdict)


@pytest.mark.parametrize("setting", ["ForceCommand internal-sftp", "ForceCommand echo this account is for sensors"])
def test_an_account_that_runs_no_commands_is_told(start_sshd, ssh_config, setting):
    found = look(ssh_config(start_sshd("forced", setting)))
    assert found["reachable"].verdict == "fail" and found["reachable"].mend
    assert {f.verdict for name, f in found.items() if name != "reachable"} == {"skip"}


def test_an_unknown_host_key_is_told_with_the_command_that_adds_it(sshd, ssh_config, tmp_path):
    found = look(ssh_config(sshd, UserKnownHostsFile=tmp_path / "none"))
    assert found["reachable"].verdict == "fail"
    assert "ssh-keyscan" in found["reachable"].mend or "--accept-new-host-key" in found["reachable"].mend


def test_a_greeting_before_every_command_is_told(start_sshd, ssh_config, tmp_path):
    server = start_sshd("noisy")
    (server.folder / "greet").write_text('#!/bin/sh\necho Welcome to the lab\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    os.chmod(server.folder / "greet", 0o755)
    greeting = start_sshd("noisy", f'ForceCommand "{server.folder}/greet"')
    found = look(ssh_config(greeting))
    assert found["login shell"].verdict == "warn" and "'Welcome to the lab'" in found["login shell"].sentence
    assert found["python"].verdict == "ok"  # the greeting is no part of an answer


def test_a_python_that_is_not_there_is_told(sshd, ssh_config):
    found = look(ssh_config(sshd), python="no-such-python")
    assert found["python"].verdict == "fail" and "--python" in found["python"].mend
    assert found["hash"].verdict == "ok"  # what needs no Python is tried all the same


def test_an_interpreter_that_dies_of_numpy_is_told(sshd, ssh_config, tmp_path):
    """As on JetPack 4: the process really dies of SIGILL where numpy is imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    found = look(ssh_config(sshd), python=str(python))
    assert found["numpy"].verdict == "fail" and "OPENBLAS_CORETYPE" in found["numpy"].mend


def test_the_artifact_says_what_it_needs(sshd, ssh_config, tmp_path):
    artifact = tiny_artifact(tmp_path, torchscript=False, limits={"peak_rss_mb": 1e9})
    found = look(ssh_config(sshd), artifact=artifact, profile=load_profile("x86-cpu"))
    assert "onnxruntime" in found["runtimes"].sentence and found["opset"].sentence.startswith("opset 13;")
    assert found["memory"].verdict == "fail" and "1000000000 MiB" in found["memory"].sentence


def test_the_command_reports_and_leaves_by_its_status(sshd, ssh_config):
    options = ("--ssh-config", str(ssh_config(sshd)), "--python", sys.executable)
    good = run_edgeopt("doctor", "device", *options, "--json")
    assert good.returncode == 0, good.stderr
    told = json.loads(good.stdout)
    assert told["device"] == "device" and told["counts"]["fail"] == 0 and {f["where"] for f in told["findings"]} == {
        "here", "device",
    }  # fmt: skip
    other = "thor"  # a board that no machine of the tests is
    bad = run_edgeopt("doctor", "device", *options, "--profile", other)
    assert bad.returncode == 15 and ("fail  architecture" in bad.stdout or "fail  gpu" in bad.stdout)
    assert "checks fail" in bad.stderr and "ssh -t device" in bad.stdout


def test_this_machine_is_a_device_without_a_host(tmp_path):
    done = run_edgeopt("doctor", "--root", str(tmp_path), "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["device"] == "this machine" and list(tmp_path.iterdir()) == []
