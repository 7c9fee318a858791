"""The acceptance run on a real server: it goes on after a failure, and its report names nobody."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SCRIPTS
from tests.small_project import write_project


@pytest.fixture(scope="module")
def on_board():
    loader = SourceFileLoader("on_board", str(SCRIPTS / "on-board"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


NAMED = {
    "device": "anna@plant-7.example.org:2222",
    "facts": {"user": "anna", "home": "/home/anna", "kernel": "5.10.120-tegra", "l4t": "35.6.1", "cuda": "11.4",
              "model": "/data/anna/m.py:f"},
    "said": "error: cannot write /data/anna/blobs\n  where: anna@10.1.2.3:22, fe80::1ff:fe23:4567:890a, plant-7",
    "log": [
        "serial 1421622041234", "id 123e4567-e89b-12d3-a456-426614174000", "48:b0:2d:11:22:33",
        "SHA256:Jm0yZ3cGk8Qf3gqMUI2dZpJcYQX7xkCq0wF0x1a2b3c", "~/.edgeopt/digits and ../up/there", "see file:///root/x",
    ],
}  # fmt: skip
SECRETS = (
    "anna", "plant-7", "example.org", "10.1.2.3", "fe80", "1421622041234", "123e4567", "48:b0", "Jm0yZ3", "/data",
    "/home", ".edgeopt/digits", "up/there", "/root",
)  # fmt: skip


def test_names_addresses_numbers_and_paths_are_taken_out(on_board):
    step = on_board.Step("detect", "pass", result=NAMED)
    asked = type("Asked", (), {"host": "plant-7"})()
    whole = on_board.report(asked, [step])
    text = json.dumps(whole)
    assert [secret for secret in SECRETS if secret in text] == []
    facts = whole["steps"][0]["result"]["facts"]
    assert (facts["kernel"], facts["l4t"], facts["cuda"]) == ("5.10.120-tegra", "35.6.1", "11.4")
    assert "cannot write <path>" in text


@given(st.from_regex(r"(/[a-z]{2,8}){1,4}", fullmatch=True), st.ip_addresses(v=4).map(str))
def test_no_path_and_no_address_is_left(on_board, path, address):
    said = on_board.Anonymous(set()).of({"said": f"{path}: {address} refused '{path}' ({address}:22)"})["said"]
    assert path not in said and address not in said


def test_versions_and_figures_stay(on_board):
    runtimes = {"torch": "2.1.0a0+41361538.nv23.06", "numpy": "1.23.5"}
    data = {"runtimes": runtimes, "p50_ms": 1.25, "ok": True, "none": None}
    assert on_board.Anonymous({"jetson"}).of(data) == data


def call(tmp_path: Path, *argv: str) -> tuple[subprocess.CompletedProcess, dict]:
    out = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "on-board"), *argv, "--out", str(out)], capture_output=True, text=True,
        env=environment,
    )  # fmt: skip
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_a_device_that_is_not_there_is_reported_and_not_a_crash(tmp_path):
    done, report = call(tmp_path, "nobody@127.0.0.1:1", "--profile", "thor", "--project", str(tmp_path))
    assert done.returncode == 1, done.stderr
    verdicts = {step["name"]: step["verdict"] for step in report["steps"]}
    assert verdicts["detect"] == verdicts["build"] == "fail" and verdicts["rollback"] == "skip"
    assert "127.0.0.1" not in json.dumps(report) and "nobody" not in json.dumps(report)


@pytest.mark.slow
def test_the_whole_run_on_a_device(sshd, ssh_config, tmp_path):
    project = write_project(
        tmp_path / "bars", without=("train", "loss", "qat", "evaluate", "calibration", "limits")
    )  # fmt: skip
    profile = tmp_path / "one.yaml"
    base = "x86-cpu" if os.uname().machine == "x86_64" else "arm64-cpu"
    small = "precision: {allowed: [fp32]}\nbackends: [torchscript]\nmeasure: {tune: false}\n"
    profile.write_text(f"base: {base}\n{small}")
    done, report = call(
        tmp_path, "device", "--ssh-config", str(ssh_config(sshd)), "--python", sys.executable, "--quick",
        "--trials", "unprofiled",
        "--root", str(tmp_path / "root"), "--project", str(project), "--profile", str(profile),
    )  # fmt: skip
    verdicts = {re.sub(r" <.*", "", step["name"]): step["verdict"] for step in report["steps"]}
    assert done.returncode == 0, done.stderr + json.dumps(report)[:3000]
    for name in (
        "detect",
        "doctor",
        "build",
        "build with fuser flags",
        "deploy",
        "validate",
        "fuser flags",
        "rollback",
    ):
        assert verdicts[name] == "pass", name
    assert str(tmp_path) not in json.dumps(report) and str(sshd.port) not in json.dumps(report)
    by_name = {step["name"]: step["result"] for step in report["steps"]}
    first, second = by_name["deploy"]["activated"]["digest"], by_name["deploy another release"]["activated"]["digest"]
    assert first != second and by_name["rollback"]["digest"] == first
    trials = by_name["fuser flags"]["candidates"]
    assert len(trials) > 1 and all(trial["p50_ms"] > 0 for trial in trials if not trial["failure"])
