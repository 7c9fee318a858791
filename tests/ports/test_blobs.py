"""The blob store of a device: what it needs there, and how it goes on after a broken upload."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys

import pytest

from edgeopt import digest
from edgeopt.errors import DeviceError, TransferError
from edgeopt.ports import blobs
from edgeopt.ports.blobs import BlobStore, Part
from edgeopt.ports.local import LocalConnection
from tests.conftest import absent

DATA = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(DATA).hexdigest()
BASE = ("sh", "mkdir", "cat", "wc", "df", "tail", "sync", "chmod", "mv", "rm")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def device_with(tmp_path, monkeypatch):
    """device_with(*programs): a device that has a few programs, and those."""

    def limit(*programs: str) -> LocalConnection:
        folder = tmp_path / "bin"
        folder.mkdir()
        for program in (*BASE, *programs):
            # the python3 of a PATH may be a script that needs more programs
            path = sys.executable if program == "python3" else shutil.which(program)
            if path is None:
                absent(f"{program} is not installed")
            (folder / program).write_text(f'#!{shutil.which("sh")}\nexec "{path}" "$@"\n')
            (folder / program).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return LocalConnection()

    return limit


@pytest.mark.parametrize("program", ["openssl", "sha256sum", "shasum", "python3"])
def test_one_program_that_hashes_is_enough(device_with, source, tmp_path, program):
    store = BlobStore(device_with(program), str(tmp_path / "root"), owner="a")
    assert store.survey({SHA256: len(DATA)}).missing == {SHA256: None}
    assert store.upload(source, SHA256, len(DATA), None) == len(DATA)
    blob = tmp_path / "root" / "blobs" / "sha256" / SHA256[:2] / SHA256
    assert digest.of_file(blob) == SHA256 and blob.stat().st_mode & 0o222 == 0
    assert store.survey({SHA256: len(DATA)}).missing == {}


def test_a_device_that_cannot_hash_says_so_and_keeps_the_part(device_with, source, tmp_path):
    store = BlobStore(device_with(), str(tmp_path / "root"), owner="a")
    with pytest.raises(TransferError, match="no openssl, sha256sum, shasum or python3"):
        store.upload(source, SHA256, len(DATA), None)
    assert [p.name for p in (tmp_path / "root").rglob("*") if p.is_file()] == [f"{SHA256}.a.part"]


@pytest.fixture
def df_said(tmp_path, monkeypatch):
    """A file with what the device's own df answered last: the free space of a shared disk is another one soon."""
    folder, said = tmp_path / "df", tmp_path / "df said"
    folder.mkdir()
    (folder / "df").write_text(f'#!/bin/sh\n"{shutil.which("df")}" "$@" | tee "{said}"\n')
    (folder / "df").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return said


def test_a_part_is_surveyed_with_its_hash_and_gone_on_from(source, tmp_path, df_said):
    part = tmp_path / "root" / "blobs" / "sha256" / SHA256[:2] / f"{SHA256}.a.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[:1000])
    store = BlobStore(LocalConnection(), str(tmp_path / "root"), owner="a")
    survey = store.survey({SHA256: len(DATA)})
    assert survey.missing == {SHA256: Part(1000, digest.of_bytes(DATA[:1000]))}
    assert survey.free_bytes == int(df_said.read_text().splitlines()[-1].split()[3]) * 1024 > 0
    moved = []
    assert store.upload(source, SHA256, len(DATA), survey.missing[SHA256], advance=moved.append) == len(DATA) - 1000
    assert sum(moved) == len(DATA)
    assert digest.of_file(part.with_name(SHA256)) == SHA256 and not part.exists()


def test_another_owners_part_is_left_alone(source, tmp_path):
    part = tmp_path / "root" / "blobs" / "sha256" / SHA256[:2] / f"{SHA256}.a.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[:1000])
    store = BlobStore(LocalConnection(), str(tmp_path / "root"), owner="b")
    assert store.survey({SHA256: len(DATA)}).missing == {SHA256: None}
    store.upload(source, SHA256, len(DATA), None)
    assert part.read_bytes() == DATA[:1000]


@pytest.mark.parametrize(
    ("part", "offset"),
    [
        (None, 0),
        (Part(0, digest.of_bytes(b"")), 0),
        (Part(7, digest.of_bytes(DATA[:7])), 7),
        (Part(len(DATA), SHA256), len(DATA)),
        (Part(7, digest.of_bytes(b"another")), 0),
        (Part(len(DATA) + 1, SHA256), 0),
    ],
)
def test_only_the_beginning_of_the_file_is_built_upon(source, part, offset):
    assert blobs.resume_offset(source, len(DATA), part) == offset


def test_a_blob_that_arrives_whole_already_is_only_renamed(source, tmp_path):
    store = BlobStore(LocalConnection(), str(tmp_path / "root"), owner="a")
    part = tmp_path / "root" / "blobs" / "sha256" / SHA256[:2] / f"{SHA256}.a.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA)
    assert store.upload(source, SHA256, len(DATA), store.survey({SHA256: len(DATA)}).missing[SHA256]) == 0
    assert os.listdir(part.parent) == [SHA256]


@pytest.mark.parametrize(
    ("line", "free_bytes"),
    [
        ("/dev/mmcblk0p1 30309264 9171624 19782584 32% /", 19782584 * 1024),
        ("my server:/ex port 100 60 40 60% /mnt/with 1 2 3 4% in it", 40 * 1024),
        ("/dev/sda1 1000 1100 -100 110% /", 0),
        ("tmpfs 3072 0 3072 0% /disk", 3072 * 1024),
        ("overlay 100 50 50 - /", None),
        ("", None),
    ],
)
def test_the_free_space_is_read_from_df(line, free_bytes):
    if free_bytes is None:
        with pytest.raises(DeviceError, match="df said"):
            blobs.free_bytes(line, "device:/root")
    else:
        assert blobs.free_bytes(line, "device:/root") == free_bytes
