"""`edgeopt build --on HOST`: the gates run on the device, over a real OpenSSH server."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

import edgeopt
from edgeopt.onboard import environment, machine
from edgeopt.spec.profile_values import VNNI_FLAGS
from tests.small_project import run_edgeopt, write_project

NATIVE = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}[platform.machine()]
FOREIGN = {"x86_64": "arm64-cpu", "aarch64": "x86-cpu"}[platform.machine()]
FLAGS = set(environment.describe()["cpu_flags"])
# a profile that asks for no instruction, so that every machine is its target
PROFILE = "base: {base}\ntarget: {{cpu_features: []}}\nbackends: [onnxruntime]\nroot: {root}\n"
NO_TRAINING = ("train", "loss", "qat")


@pytest.fixture(scope="module")
def built(tmp_path_factory, sshd):
    """The artifact that was built on the device, and the record of the build."""
    folder = tmp_path_factory.mktemp("on")
    write_project(folder / "project", without=NO_TRAINING)
    config = folder / "ssh_config"
    config.write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {sshd.port}\n  HostKeyAlias [127.0.0.1]:{sshd.port}\n"
        f"  IdentityFile {sshd.folder}/client_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {sshd.known_hosts}\n"
    )
    (folder / "any.yaml").write_text(PROFILE.format(base=NATIVE, root=folder / "root"))
    argv = ["build", "--profile", "any.yaml", "--on", "box", "--ssh-config", str(config), "--python", sys.executable]
    argv += ["--project", "project", "--out", "bars.edgeopt"]
    done = run_edgeopt(*argv, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    again = run_edgeopt(*argv, cwd=folder)
    assert "nothing has changed since it was built" in again.stdout, again.stdout + again.stderr
    return folder, json.loads(done.stdout)


def test_the_choice_is_the_devices_with_its_figures_and_settings(built):
    folder, record = built
    selection = json.loads((folder / "bars.edgeopt" / "selection.json").read_text())
    assert (selection["decided_by"], selection["verdict"]) == ("build", "faster")
    assert "@127.0.0.1:" in selection["where"]
    assert set(selection["figures"]) == {"onnxruntime-fp32", "onnxruntime-int8"}
    for figures in selection["figures"].values():
        low, high = figures["interval_ms"]
        assert 0 < low <= high
    assert selection["settings"]["cores"] == machine.cores()["all"]
    assert (
        record["measured_on"]["host"] == selection["where"] and record["measured_on"]["machine"] == platform.machine()
    )


def test_the_record_holds_the_whole_table_with_what_was_tried(built):
    _, record = built
    for row in record["candidates"]:
        assert row["kept"] and row["stand_in"] is None
        assert row["result"]["metrics"]["p0"] > 0 and row["result"]["sqnr_db"] is not None  # judged there too
        assert len(row["result"]["rounds_ms"]) >= 3 and row["result"]["warm_up"]["calls"] >= 5
        assert [s["threads"] for s in row["result"]["tried"]][:1] == [1]
        assert row["noise"]["cores"] == machine.cores()
    assert isinstance(record["refused"], list)


def test_the_target_has_the_devices_instructions(built):
    target = json.loads((built[0] / "bars.edgeopt" / "manifest.json").read_text())["target"]
    assert ("avx2" in target["cpu_features"]) is ("avx2" in FLAGS)
    assert target["vnni"] is bool(VNNI_FLAGS & FLAGS)


def test_nothing_stays_on_the_device_and_no_timing_is_in_the_manifest(built):
    folder, record = built
    assert list((folder / "root").glob(".build-*")) == []
    manifest = (folder / "bars.edgeopt" / "manifest.json").read_text()
    assert "allow_spinning" not in manifest and "p50" not in manifest and "127.0.0.1" not in manifest


def test_the_application_runs_it_with_the_settings_that_were_found(built):
    folder, _ = built
    selection = json.loads((folder / "bars.edgeopt" / "selection.json").read_text())
    with edgeopt.load(folder / "bars.edgeopt") as model:
        assert model.candidate == selection["candidate"]
        applied = {flag["flag"]: flag["value"] for flag in model.flags}
        assert selection["settings"]["flags"].items() <= applied.items()
        assert model.predict({"image": np.zeros((2, 1, 12, 12), np.float32)})["scores"].shape == (2, 2)


def test_another_architecture_is_refused_before_any_work(tmp_path):
    write_project(tmp_path, without=NO_TRAINING)
    done = run_edgeopt("build", "--profile", FOREIGN, "--on", "here", "--project", str(tmp_path), cwd=tmp_path)
    arch = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    assert done.returncode == 3
    assert f"this machine is {platform.machine()} and the profile '{FOREIGN}' is for {arch}" in done.stderr
    assert not Path(tmp_path, ".edgeopt").exists()
