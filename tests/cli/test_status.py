"""`edgeopt status`, `push --dry-run` and `rollback --release` as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tiny import tiny_artifact


@pytest.fixture
def edgeopt(tmp_path):
    def call(*args, code: int = 0):
        argv = [sys.executable, "-m", "edgeopt", *args, "--root", tmp_path / "root"]
        done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done

    return call


def test_status_of_this_machine_from_push_to_garbage(edgeopt, tmp_path):
    assert "no releases are there" in edgeopt("status", code=15).stderr
    a = tiny_artifact(tmp_path / "a", torchscript=False)
    said = edgeopt("push", a.folder, "--dry-run").stdout
    assert f"would push tiny {a.digest[:12]}" in said and "float.onnx" in said and "free " in said
    assert not (tmp_path / "root").exists()
    edgeopt("push", a.folder)
    edgeopt("activate", a.folder)
    part = tmp_path / "root" / "blobs" / "sha256" / ("0" * 64 + ".tiny.part")
    part.write_bytes(b"x" * 300_000)
    said = edgeopt("status").stdout
    for words in (f"{a.digest[:12]}  current", "x86-cpu", "1 parts of uploads, 0.3 MB", "tiny activate", "free"):
        assert words in said
    assert "removed  1 parts of uploads" in edgeopt("status", "-", "tiny", "--gc").stdout and not part.exists()
    data = json.loads(edgeopt("status", "--json").stdout)
    assert data["names"][0]["releases"][0]["digest"] == a.digest and data["collected"] is None
    assert json.loads(edgeopt("push", a.folder, "--dry-run", "--json").stdout)["already_there"] is True
    assert "no previous release" in edgeopt("rollback", "tiny", code=15).stderr
    assert "it was already" in edgeopt("rollback", "tiny", "--release", a.digest[:8]).stdout
