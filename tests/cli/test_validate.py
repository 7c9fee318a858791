"""validate and report as commands: what is on stdout, what on stderr, and the exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tiny import tiny_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("artifact"), torchscript=False, metrics={}, cases_complete=False)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """An artifact whose latency limit nothing can keep."""
    folder = tmp_path_factory.mktemp("slow")
    return tiny_artifact(folder, torchscript=False, metrics={}, cases_complete=False, limits={"latency_ms": 1e-6})


def edgeopt(*argv) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "edgeopt", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_validate_prints_the_report_and_report_shows_it_again(artifact):
    done = edgeopt("validate", artifact.folder, "--rounds", 1, "--calls", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS  tiny on this machine\nruns onnxruntime-fp32: the only candidate that passed")
    again = edgeopt("report", artifact.folder)
    assert again.returncode == 0
    assert done.stdout.startswith(again.stdout)
    data = json.loads(edgeopt("report", artifact.folder, "--json").stdout)
    assert data["verdict"] == "pass" and data["candidates"][0]["calls"] == 3


def test_a_device_is_a_root_too(artifact, tmp_path):
    argv = ["--root", tmp_path / "root", "--rounds", 1, "--calls", 3, "--json"]
    done = edgeopt("validate", artifact.folder, *argv)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["chosen"] == "onnxruntime-fp32"
    assert (tmp_path / "root" / "tiny" / "releases" / artifact.digest / "selection.json").is_file()


def test_a_failed_validation_is_exit_16_after_the_report(slow):
    done = edgeopt("validate", slow.folder, "--rounds", 1)
    assert done.returncode == 16
    assert done.stdout.startswith("FAIL  tiny on this machine")
    assert done.stderr.startswith("error: no candidate passes") and "Traceback" not in done.stderr
    as_json = edgeopt("validate", slow.folder, "--rounds", 1, "--json")
    assert as_json.returncode == 16
    assert json.loads(as_json.stdout)["verdict"] == "fail"  # one document


@pytest.mark.parametrize("argv, code, said", [
    (["validate", "gone.edgeopt"], 10, "no such artifact"),
    (["report", "gone.edgeopt"], 10, "no report yet"),
    (["validate"], 2, "Missing argument"),
    (["validate", "x", "--rounds", "0"], 2, "--rounds"),
])  # fmt: skip
def test_mistakes_have_one_message_and_their_exit_status(argv, code, said):
    done = edgeopt(*argv)
    assert done.returncode == code
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["validate", "report"])
def test_help_shows_an_example(command):
    assert f"edgeopt {command} digits.edgeopt" in edgeopt(command, "--help").stdout
