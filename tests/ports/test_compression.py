"""What travels compressed, and that it arrives as it was: cut, resumed, by whichever program the device has."""

from __future__ import annotations

import fcntl
import gzip
import random
import shutil
import subprocess
import threading

import pytest

from edgeopt import digest
from edgeopt.errors import TransferError
from edgeopt.ports import compression
from edgeopt.ports.blobs import BlobStore
from edgeopt.ports.connect import connect
from tests.conftest import absent, wait_until
from tests.relay import Relay

NOISE = random.Random(3).randbytes(3_000_000)
WEIGHTS = bytes(b & 0x3F for b in NOISE)  # shrinks to three quarters


@pytest.fixture
def file(tmp_path):
    def make(data: bytes):
        path = tmp_path / "weights"
        path.write_bytes(data)
        return path

    return make


@pytest.mark.parametrize(
    ("data", "programs", "method"),
    [
        (WEIGHTS, ("zstd", "gzip"), "zstd"),
        (WEIGHTS, ("gzip",), "gzip"),
        (WEIGHTS, (), None),
        (NOISE, ("zstd", "gzip"), None),  # what does not shrink is never compressed
        (b"a" * 4000, ("zstd", "gzip"), None),
        (NOISE[:2_900_000] + bytes(100_000), ("zstd", "gzip"), None),
        (bytes(b & 0x7F for b in NOISE), ("gzip",), None),  # an eighth less is not worth gzip's time
        (b"", ("zstd", "gzip"), None),
    ],
    ids=["zstd", "gzip", "none there", "noise", "small", "mostly noise", "hardly", "empty"],
)
def test_compressed_where_it_pays(file, data, programs, method):
    if method == "zstd" and not compression._is_here("zstd"):
        absent("the package zstandard is not installed")
    assert compression.choose(file(data), len(data), 0, programs) == method


def test_only_what_is_left_decides(file):
    data = WEIGHTS + NOISE
    assert compression.choose(file(data), len(data), 0, ("gzip",)) is None
    assert compression.choose(file(NOISE + WEIGHTS), len(data), len(NOISE), ("gzip",)) == "gzip"


@pytest.mark.parametrize("offset", [0, 1, 1_234_567, len(WEIGHTS)])
@pytest.mark.parametrize("method", ["zstd", "gzip"])
def test_the_stream_is_the_rest_of_the_file(file, method, offset):
    moved = []
    with compression.Compressed(file(WEIGHTS), offset, method, moved.append) as stream:
        data = b"".join(iter(lambda: stream.read(10_000), b""))
        assert stream.sent_bytes == len(data)
    if method == "zstd":
        if shutil.which("zstd") is None:
            absent("zstd is not installed (Debian: zstd)")
        back = subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True).stdout
    else:
        back = gzip.decompress(data)
    assert back == WEIGHTS[offset:] and sum(moved) == len(WEIGHTS) - offset


def nobody_writes(part) -> bool:
    """Whether what the cut left running on the device has ended."""
    with open(part, "rb") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("method", ["zstd", "gzip"])
def test_an_upload_that_was_cut_goes_on_at_the_verified_offset(sshd, ssh_config, file, tmp_path, method):
    path = file(WEIGHTS)
    sha256, size = digest.of_file(path), len(WEIGHTS)
    root = tmp_path / "root"
    blob = root / "blobs" / "sha256" / sha256[:2] / sha256
    part = blob.with_name(f"{sha256}.a.part")

    def cut():  # once the device has taken what had travelled, of which a reset would throw away what it had not read
        wait_until(lambda: part.exists() and part.stat().st_size > 1_000_000)
        relay.cut()

    with Relay(sshd.port, silent_after=1_500_000) as relay:
        config = ssh_config(sshd, "relayed", Port=relay.port)
        threading.Thread(target=cut, daemon=True).start()
        with connect("device", config=config) as device, pytest.raises(TransferError):
            store = BlobStore(device, str(root), owner="a")
            survey = store.survey({sha256: size})
            if method not in survey.programs:
                absent(f"{method} is not installed")
            store._programs = (method,)
            store.upload(path, sha256, size, None)
    assert not blob.exists()
    assert wait_until(lambda: part.exists() and part.stat().st_size > 1_000_000 and nobody_writes(part))
    with connect("device", config=ssh_config(sshd)) as device:
        store = BlobStore(device, str(root), owner="a")
        part = store.survey({sha256: size}).missing[sha256]
        assert part is not None and part.size > 1_000_000  # counted in the file's bytes, more than had travelled
        store._programs = (method,)
        sent = store.upload(path, sha256, size, part)
        assert sent == size - part.size
        assert store.sent_bytes < 0.9 * sent
    assert blob.read_bytes() == WEIGHTS
