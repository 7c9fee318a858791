"""`edgeopt detect` as a user calls it, and the profile that it writes of each recorded device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from edgeopt.device import facts, matching
from edgeopt.errors import ProfileError, UsageError
from edgeopt.flows.detect import Detected, nearest, profile_text, write_profile
from edgeopt.spec.facts import DeviceFacts
from edgeopt.spec.profile import load_profile
from tests.device.recordings import FOLDER, NAMES


def detected(name: str, **change) -> Detected:
    found = facts.recorded(FOLDER / name).model_copy(update=change)
    return Detected(name, found, tuple(matching.fits(found)))


@pytest.mark.parametrize("name", NAMES)
def test_the_written_profile_fits_its_own_device(name, tmp_path):
    device = detected(name)
    write_profile(device, tmp_path / "own.yaml", root="/data/models")
    profile = load_profile(str(tmp_path / "own.yaml"))
    assert matching.fit(device.facts, profile).reasons == ()
    assert profile.root == "/data/models"
    f, target = device.facts, profile.target
    if target.kind == "jetson":
        assert (target.module, target.sm, target.l4t, target.tensorrt) == (f.module, f.sm, f.l4t, f.tensorrt)
        assert profile.jetpack == f.jetpack
    assert target.memory_gb == f.memory_bytes // 10**9
    assert target.python == ".".join(f.python.split(".")[:2])


def test_what_the_base_does_not_say_of_a_desktop_is_filled_in(tmp_path):
    write_profile(detected("desktop-cuda"), tmp_path / "own.yaml")
    profile = load_profile(str(tmp_path / "own.yaml"))
    assert (profile.target.sm, profile.target.vnni, profile.target.tensorrt) == ("8.9", True, "11.0.0")
    assert profile.target.torch.max == "2.11"
    text = profile_text(detected("desktop-cuda", tensorrt=None))
    assert "No TensorRT was found" in text and "- tensorrt" not in text


def test_a_name_from_the_device_cannot_add_keys(tmp_path):
    device = detected("nano-r32", model="x\nroot: /etc\n#\x1b[31m'\"", emulated="qemu-system\nlimits: {}")
    write_profile(device, tmp_path / "own.yaml")
    profile = load_profile(str(tmp_path / "own.yaml"))
    assert profile.root is None and profile.title == device.facts.model
    assert "emulated (qemu-system limits: {})" in (tmp_path / "own.yaml").read_text()


def test_nothing_is_replaced_and_bad_names_are_said(tmp_path):
    device, path = detected("nano-r32"), tmp_path / "own.yaml"
    path.write_text("mine")
    dangling = tmp_path / "link.yaml"
    dangling.symlink_to(tmp_path / "nowhere.yaml")
    for there in (path, dangling):
        with pytest.raises(UsageError, match="already"):
            write_profile(device, there)
    assert path.read_text() == "mine" and dangling.is_symlink()
    with pytest.raises(UsageError, match=r"ends in \.yaml"):
        write_profile(device, tmp_path / "own")
    with pytest.raises(UsageError, match="cannot write"):
        write_profile(device, tmp_path / "no" / "own.yaml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.yaml", "own.yaml"]


def test_a_machine_that_no_profile_is_for_is_refused():
    found = DeviceFacts(arch="riscv64")
    with pytest.raises(ProfileError, match="no shipped profile is for this device: .*riscv64"):
        nearest(Detected("board", found, tuple(matching.fits(found))))


def edgeopt(*args, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, "-m", "edgeopt", *map(str, args)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def test_the_command_over_ssh_writes_a_profile_that_checks(sshd, ssh_config, tmp_path):
    reach = ("device", "--ssh-config", ssh_config(sshd), "--python", sys.executable)
    file = tmp_path / "own.yaml"
    log = sshd.folder / "sshd.log"
    logins = log.read_text().count("Accepted publickey")
    done = edgeopt("detect", *reach, "--write", file)
    assert "PROFILE" in done.stdout and f"written  {file}" in done.stdout and "memory" in done.stdout
    assert log.read_text().count("Accepted publickey") == logins + 1
    assert edgeopt("profiles", "check", file).stdout.startswith(f"{file}: good")
    refused = edgeopt("detect", *reach, "--write", file, "--json", code=2)
    assert "already" in json.loads(refused.stdout)["what"]


def test_json_is_one_document():
    said = json.loads(edgeopt("detect", "--json").stdout)
    assert said["device"] == "this machine" and said["written"] is None
    own = DeviceFacts(**said["facts"])
    assert own.python == ".".join(map(str, sys.version_info[:3])) and own.memory_bytes
    assert {p["verdict"] for p in said["profiles"]} <= {"fits", "nearly", "no"}
    assert [p["reasons"] for p in said["profiles"] if p["verdict"] != "fits"] != []
