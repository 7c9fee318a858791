"""A device for the time of a build, over a real OpenSSH server: what travels, what stays, and whose facts count."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgeopt.device.session import files_of, opened, target_facts
from edgeopt.errors import DeviceError, ProfileError, TransferError
from edgeopt.ports.connect import connect
from edgeopt.ports.local import LocalConnection
from edgeopt.spec.profile import load_profile
from tests.conftest import wait_until


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "staging"
    (folder / "cases").mkdir(parents=True)
    for name, text in {"a.onnx": "a", "a.onnx.data": "weights", "b.onnx": "b", "cases/tensors.bin": "cases"}.items():
        (folder / name).write_text(text)
    return folder


def test_each_content_travels_once_and_nothing_stays(folder, tmp_path, sshd, ssh_config):
    root = str(tmp_path / "it's the root")
    with (
        connect("device", config=ssh_config(sshd)) as connection,
        opened(connection, python=sys.executable, root=root) as device,
    ):
        assert device.facts["python"] == sys.version.split()[0] and "@127.0.0.1:" in device.label
        moved = []
        put, connection.put = connection.put, lambda local, *rest: (moved.append(local.name), put(local, *rest))
        first = Path(device.holding(folder, files_of(folder, ["a.onnx", "cases/tensors.bin"])))
        assert sorted(p.relative_to(first).as_posix() for p in first.rglob("*") if p.is_file()) == [
            "a.onnx", "a.onnx.data", "cases/tensors.bin",
        ]  # fmt: skip
        (folder / "a.onnx").write_text("a, lowered again")
        second = Path(device.holding(folder, ["a.onnx", "cases/tensors.bin"]))
        assert (second / "a.onnx").read_text() == "a, lowered again"
        assert not (second / "a.onnx.data").exists()
        assert moved == ["a.onnx", "a.onnx.data", "tensors.bin", "a.onnx"]
        kept = [p for p in Path(device.folder).iterdir() if p.is_file()]
        assert len(kept) == 2  # the contents of the second measurement
        made = Path(device.folder)
    assert wait_until(lambda: not made.exists()), "the build's folder stayed on the device"


def test_the_folder_goes_with_a_connection_that_is_cut(tmp_path, sshd, ssh_config):
    connection = connect("device", config=ssh_config(sshd))
    session = opened(connection, python=sys.executable, root=str(tmp_path / "root"))
    made = Path(session.__enter__().folder)
    assert made.is_dir()
    connection.close()
    assert wait_until(lambda: not made.exists(), within_s=20)


def test_on_this_machine_the_files_are_used_where_they_lie(folder):
    with LocalConnection() as connection, opened(connection, python=sys.executable, root="/nowhere") as device:
        assert device.holding(folder, ["a.onnx"]) == str(folder)


def test_a_folder_that_cannot_be_made_is_an_error_with_its_place(sshd, ssh_config):
    with (
        connect("device", config=ssh_config(sshd)) as connection,
        pytest.raises(TransferError, match="cannot make a folder to measure in") as failed,
        opened(connection, python=sys.executable, root="/proc/nowhere"),
    ):
        pytest.fail("it was made")
    assert failed.value.where.endswith(":/proc/nowhere")


X86 = {"machine": "x86_64", "cpu_flags": ["avx2", "sse2", "avx512_vnni", "avx512f"]}


def test_a_device_with_vnni_gets_weights_of_8_bits():
    profile = load_profile("x86-cpu")
    assert (profile.target.vnni, profile.quantization.weight_bits) == (False, 7)
    facts = target_facts(profile, X86, "box")
    found = load_profile("x86-cpu", facts)
    assert found.target.cpu_features == ("avx2", "avx512f", "avx512_vnni")
    assert (found.target.vnni, found.quantization.weight_bits) == (True, 8)


def test_what_the_user_says_of_vnni_stays():
    mine = {"target.vnni": "false"}
    facts = target_facts(load_profile("x86-cpu", mine), X86, "box")
    found = load_profile("x86-cpu", {**facts, **mine})
    assert (found.target.vnni, found.quantization.weight_bits) == (False, 7)


def test_a_device_without_more_changes_nothing_and_a_gpus_target_takes_no_instructions():
    assert target_facts(load_profile("x86-cpu"), {"machine": "x86_64", "cpu_flags": ["avx2"]}, "box") == {}
    jetson = {"machine": "aarch64", "cpu_flags": ["asimd", "asimddp", "i8mm"]}
    assert target_facts(load_profile("orin-nx"), jetson, "jetson") == {}
    assert target_facts(load_profile("arm64-cpu"), jetson, "pi")["target.cpu_features"].endswith("asimddp, i8mm]")


def test_a_device_of_another_architecture_is_refused_in_a_sentence():
    with pytest.raises(ProfileError) as failed:
        target_facts(load_profile("arm64-cpu"), X86, "box")
    assert failed.value.what == "box is x86_64 and the profile 'arm64-cpu' is for aarch64"


def test_a_cpu_that_lacks_what_the_profile_asks_for_is_refused():
    with pytest.raises(DeviceError, match="no avx2, which the profile 'x86-cpu' asks for"):
        target_facts(load_profile("x86-cpu"), {"machine": "x86_64", "cpu_flags": ["sse2"]}, "old-box")
