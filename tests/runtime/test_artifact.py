"""Artifacts: opening one re-hashes it and trusts nothing; publishing one leaves the old or the new, never half."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from edgeopt import digest
from edgeopt.errors import ArtifactError, SpaceError
from edgeopt.runtime import artifact as room
from edgeopt.runtime.artifact import Artifact, publish
from edgeopt.spec import manifest as spec
from tests.tiny import tiny_artifact


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("made"), torchscript=False)


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made.folder, tmp_path / "tiny.edgeopt")


def edited(folder, change) -> None:
    """Rewrite the manifest's JSON through `change(value)`."""
    path = folder / "manifest.json"
    value = json.loads(path.read_bytes())
    value = change(value) or value
    path.write_bytes(digest.canonical_json(value))


def test_an_artifact_opens_and_its_digest_is_that_of_its_manifest(folder, made):
    opened = Artifact.open(folder)
    assert opened.digest == made.digest
    assert spec.encode(opened.manifest) == (folder / "manifest.json").read_bytes()


@pytest.mark.parametrize("file", ["float.onnx", "cases/tensors.bin", "onboard.pyz"])
@pytest.mark.parametrize("damage", ["one bit", "truncated", "longer", "missing", "a link", "a folder"])
def test_the_first_file_that_differs_is_named(folder, file, damage):
    path = folder / file
    data = path.read_bytes()
    if damage == "one bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    elif damage == "longer":
        path.write_bytes(data + b"x")
    else:
        path.unlink()
        if damage == "a link":
            (folder.parent / "elsewhere").write_bytes(data)
            path.symlink_to(folder.parent / "elsewhere")
        elif damage == "a folder":
            path.mkdir()
    with pytest.raises(ArtifactError) as why:
        Artifact.open(folder)
    assert str(path) in why.value.where


def test_a_folder_on_the_way_that_is_a_link_is_refused(folder):
    shutil.move(folder / "cases", folder.parent / "cases")
    (folder / "cases").symlink_to(folder.parent / "cases")
    with pytest.raises(ArtifactError, match="symbolic link"):
        Artifact.open(folder)


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/.", "", "a\\b", "a\nb", "a\x00b", "..", "manifest.json",
     "selection.json", "reports/x.json"],
)  # fmt: skip
def test_a_path_that_leaves_the_folder_or_is_reserved_is_refused(folder, path):
    def change(value):
        value["files"][path] = value["files"]["float.onnx"]

    edited(folder, change)
    with pytest.raises(ArtifactError):
        Artifact.open(folder)


def test_a_candidate_cannot_name_a_file_that_is_not_listed(folder):
    edited(folder, lambda value: value["candidates"][0].update(file="../../etc/passwd"))
    with pytest.raises(ArtifactError, match="etc/passwd"):
        Artifact.open(folder)


def test_a_tensor_cannot_reach_past_its_file(folder):
    edited(folder, lambda value: value["cases"][0]["inputs"]["x"].update(offset=10**9))
    with pytest.raises(ArtifactError, match="past the end"):
        Artifact.open(folder)


def test_a_newer_schema_is_refused_before_anything_else(folder):
    edited(folder, lambda value: {"schema_version": spec.SCHEMA + 1, "unknown": True})
    with pytest.raises(ArtifactError, match=f"schema {spec.SCHEMA + 1}"):
        Artifact.open(folder)


@pytest.mark.parametrize("size", [-1, 1 << 50, 10**400])
def test_absurd_sizes_are_refused(folder, size):
    edited(folder, lambda value: value["files"]["float.onnx"].update(size=size))
    with pytest.raises(ArtifactError):
        Artifact.open(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, "\xff", '{"schema_version": "x"}', '{"schema_version": 1}'],
)
def test_a_manifest_that_is_none_is_refused(folder, text):
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError):
        Artifact.open(folder)


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="no such artifact"):
        Artifact.open(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="no manifest.json"):
        Artifact.open(tmp_path)


def staged(folder, made, name="new"):
    staging = shutil.copytree(made.folder, folder / f".{name}.part")
    (staging / "manifest.json").unlink()
    return staging


def test_publishing_replaces_the_old_artifact_and_keeps_its_reports(made, tmp_path):
    out = tmp_path / "out.edgeopt"
    publish(staged(tmp_path, made), out, made.manifest)
    (out / "reports").mkdir()
    (out / "reports" / "1.json").write_text("{}")
    (out / "float.onnx").write_bytes(b"damaged since")
    publish(staged(tmp_path, made), out, made.manifest)
    assert Artifact.open(out).digest == made.digest
    assert (out / "reports" / "1.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out.edgeopt"]


def test_a_folder_with_something_else_is_never_replaced(made, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("x")
    with pytest.raises(ArtifactError, match="something else"):
        publish(staged(tmp_path, made), out, made.manifest)
    assert (out / "thesis.txt").exists()


def test_where_the_new_cannot_be_put_the_old_stays(made, tmp_path, monkeypatch):
    out = tmp_path / "out.edgeopt"
    publish(staged(tmp_path, made), out, made.manifest)
    staging = staged(tmp_path, made)
    rename = os.rename

    def fails_for_staging(source, target):
        if str(source) == str(staging):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(room.os, "rename", fails_for_staging)
    with pytest.raises(SpaceError):
        publish(staging, out, made.manifest)
    assert Artifact.open(out).digest == made.digest


@pytest.mark.parametrize(
    "structure",
    [
        {"kind": "tensor"},
        {"kind": "tensor", "index": 1},
        {"kind": "tensor", "index": -1},
        {"kind": "tuple"},
        {"kind": "tuple", "items": [{"kind": "tensor", "index": 0}, {"kind": "tensor", "index": 1}]},
        {"kind": "dict", "items": {"a": {"kind": "tensor", "index": 0}}},
        {"kind": "dict", "items": {"a": {"kind": "tensor", "index": 0}}, "order": ["b"]},
        {"kind": "set", "items": []},
        3,
    ],
)
def test_a_structure_that_cannot_be_restored_is_refused(folder, structure):
    edited(folder, lambda value: value.update(output_structure=structure))
    with pytest.raises(ArtifactError):
        Artifact.open(folder)


X = {"kind": "tensor", "index": 0}


@pytest.mark.parametrize(
    "structure",
    [
        X,
        {"kind": "dict", "items": {}, "order": []},
        {"kind": "dict", "items": {"x": {"kind": "tensor", "index": 1}}, "order": ["x"]},
        {"kind": "dict", "items": {"x": X, "y": X}, "order": ["x", "y"]},
        {"kind": "dict", "items": {"p": {"kind": "namedtuple", "name": "P", "items": {"x": X}}}, "order": ["p"]},
        {"kind": "dict", "items": {"x": X}, "order": ["y"]},
        7,
    ],
)
def test_an_input_structure_that_does_not_hold_every_input_once_is_refused(folder, structure):
    edited(folder, lambda value: value.update(input_structure=structure))
    with pytest.raises(ArtifactError):
        Artifact.open(folder)


def test_an_input_structure_is_read_and_counts_for_the_digest(folder):
    before = Artifact.open(folder).digest
    structure = {"kind": "dict", "items": {"p": {"kind": "tuple", "items": [X]}}, "order": ["p"]}
    edited(folder, lambda value: value.update(input_structure=structure))
    opened = Artifact.open(folder)
    assert opened.manifest.input_structure == structure and opened.digest != before


def test_a_manifest_without_input_structure_keeps_its_bytes_and_digest(folder):
    """Artifacts that were built before manifests had the key stay what they are called."""
    data = (folder / "manifest.json").read_bytes()
    assert b"input_structure" not in data
    assert spec.encode(Artifact.open(folder).manifest) == data
