"""A TorchScript file goes to no device whose torch is older than the one that wrote it (case V04)."""

from __future__ import annotations

import logging
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from edgeopt.backends import script_file
from edgeopt.errors import DeviceError
from edgeopt.flows import torch_versions
from edgeopt.flows.push import push
from edgeopt.ports.local import LocalConnection
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import Manifest
from tests.tiny import candidate, hash_files, tiny_artifact

HOST = torch.__version__.split("+")[0]
SCRIPT = candidate("torchscript-fp32", "torchscript", "float.pt")


def made(folder: Path, *, written_by: str = HOST, only_script: bool = True, target: dict | None = None) -> Artifact:
    """The tiny artifact with a file as the backend writes it, said to be written by another torch."""
    artifact = tiny_artifact(folder)
    path = artifact.folder / "float.pt"
    data = script_file.normalised(path.read_bytes())
    path.write_bytes(renamed(data, written_by))
    changes = {"files": hash_files(artifact.folder)}
    changes["files"].pop("manifest.json")
    changes["target"] = {"kind": "cpu", "arch": "x86_64", "torch": target}
    if only_script:
        changes["candidates"] = (SCRIPT,)
    manifest = Manifest.model_validate(artifact.manifest.model_dump() | changes)
    return Artifact(artifact.folder, manifest)


def renamed(data: bytes, version: str) -> bytes:
    """The file with another version in its record, which is stored as it is and no longer than it was."""
    import io
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            own = name.endswith(torch_versions.TORCH_RECORD)
            new.writestr(name, version.encode() if own else old.read(name))
    return out.getvalue()


@pytest.fixture
def python(tmp_path):
    """python(torch=..., onnxruntime=...): an interpreter that finds packages of these versions, and no others."""

    def write(**versions: str) -> str:
        site = tmp_path / "site"
        for name, version in versions.items():
            (site / name).mkdir(parents=True)
            (site / name / "__init__.py").touch()
            (site / f"{name}-{version}.dist-info").mkdir()
            (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {os.path.realpath(sys.executable)} -S "$@"\n')
        path.chmod(0o755)
        return str(path)

    return write


def check(artifact: Artifact, python: str) -> None:
    with LocalConnection() as connection:
        torch_versions.check(artifact, connection, python)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_file_says_which_torch_wrote_it(tmp_path):
    written = torch_versions.written_by(made(tmp_path), SCRIPT)
    assert written.torch == HOST and written.file_format.isdigit()
    assert torch_versions.TORCH_RECORD == script_file.TORCH_RECORD
    with_record = tmp_path / "tiny.edgeopt" / "float.pt"
    assert torch.jit.load(str(with_record))(torch.zeros(2, 4)).shape == (2, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function, path", [(torch.relu, "version"), (torch.nn.functional.gelu, ".data/version")])
def test_the_format_is_found_where_files_of_it_keep_it(function, path, tmp_path):
    """Files with an operator of format 6 and later keep the number below .data, older ones beside it."""
    artifact = tiny_artifact(tmp_path)
    traced = torch.jit.trace(function, torch.zeros(2, 4))
    torch.jit.save(traced, str(artifact.folder / "float.pt"))
    with zipfile.ZipFile(artifact.folder / "float.pt") as file:
        assert f"float/{path}" in file.namelist()
    written = torch_versions.written_by(artifact, SCRIPT)
    assert (int(written.file_format) >= 6) == (path == ".data/version")


def test_an_older_torch_is_refused_and_the_error_names_both(tmp_path, python):
    there = python(torch="1.10.2")
    with pytest.raises(DeviceError) as refused:
        check(made(tmp_path / "a", written_by="2.13.0"), there)
    said = str(refused.value)
    assert "float.pt was written by torch 2.13.0 (file format " in said and "the device has torch 1.10.2" in said
    assert "--target-python" in said


@pytest.mark.parametrize("there", ["2.13.0", "2.13.4", "2.14.0", "3.0.1"])
def test_the_same_torch_and_newer_ones_pass(tmp_path, python, there):
    check(made(tmp_path / "a", written_by="2.13.0"), python(torch=there))


@pytest.mark.parametrize(
    "there, passes", [("1.10.2", False), ("2.0.1", False), ("2.1.2", True), ("2.2.0", True), ("2.3.0", False)]
)
def test_a_torch_within_the_range_that_the_file_was_tried_with_passes(tmp_path, python, there, passes):
    artifact = made(tmp_path / "a", written_by="2.13.0", target={"min": "2.1.0", "max": "2.2.2"})
    if passes:
        check(artifact, python(torch=there))
    else:
        with pytest.raises(DeviceError, match=f"the device has torch {there}"):
            check(artifact, python(torch=there))


def test_another_candidate_that_the_device_runs_makes_it_a_warning(tmp_path, python, caplog):
    artifact = made(tmp_path / "a", written_by="2.13.0", only_script=False)
    with caplog.at_level(logging.WARNING, "edgeopt"):
        check(artifact, python(torch="2.1.2", onnxruntime="1.16.3"))
    assert "torchscript-fp32 will not run on" in caplog.text and "torch 2.13.0" in caplog.text


def test_another_candidate_without_its_runtime_saves_nothing(tmp_path, python):
    with pytest.raises(DeviceError, match=r"torch 2\.13\.0 .* torch 2\.1\.2"):
        check(made(tmp_path / "a", written_by="2.13.0", only_script=False), python(torch="2.1.2"))


def test_a_device_without_torch_or_python_is_left_to_validate(tmp_path, python):
    artifact = made(tmp_path / "a", written_by="2.13.0")
    check(artifact, python())
    check(artifact, "/nowhere/python")


def test_an_older_artifact_without_the_record_passes(tmp_path, python):
    artifact = tiny_artifact(tmp_path / "a", candidates=[SCRIPT])
    assert torch_versions.written_by(artifact, SCRIPT).torch is None
    check(artifact, python(torch="1.10.2"))


def test_nothing_moves_when_it_is_refused(tmp_path, python):
    artifact, there, root = made(tmp_path / "a", written_by="2.13.0"), python(torch="1.10.2"), tmp_path / "root"
    with LocalConnection() as connection:
        from edgeopt.flows.place import locked
        from edgeopt.flows.push import push_to

        with locked(connection, str(root), "tiny") as place, pytest.raises(DeviceError, match="torch 1.10.2"):
            push_to(place, artifact, python=there)
        assert not list(root.rglob("*.pt*")) and not list((root / "tiny" / "releases").iterdir())
        assert push(tiny_artifact(tmp_path / "b", torchscript=False), connection, root=str(root)).blobs_moved
