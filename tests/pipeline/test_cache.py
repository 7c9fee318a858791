"""The stage cache: whole results or none, verified when read."""

from __future__ import annotations

import errno
import os

import pytest

from edgeopt.errors import SpaceError
from edgeopt.pipeline.cache import StageCache


def write(text: str):
    def into(folder):
        (folder / "sub").mkdir()
        (folder / "sub" / "value.txt").write_text(text)

    return into


def test_a_stored_result_is_found_by_its_key_only(tmp_path):
    cache = StageCache(tmp_path)
    cache.store("optimize", "a" * 64, write("one"))
    found = cache.find("optimize", "a" * 64)
    assert (found / "sub" / "value.txt").read_text() == "one"
    assert cache.find("optimize", "b" * 64) is None
    assert cache.find("quantize", "a" * 64) is None


@pytest.mark.parametrize("damage", ["change", "truncate", "remove", "index"])
def test_a_damaged_result_is_made_again(tmp_path, damage):
    cache = StageCache(tmp_path)
    folder = cache.store("optimize", "key", write("value"))
    file = folder / "sub" / "value.txt"
    if damage == "change":
        file.write_text("other")
    elif damage == "truncate":
        file.write_text("")
    elif damage == "remove":
        file.unlink()
    else:
        (folder / "index.json").write_text("{")
    assert cache.find("optimize", "key") is None
    assert not folder.exists()


def test_a_result_that_fails_half_way_leaves_nothing(tmp_path):
    def fails(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("killed")

    cache = StageCache(tmp_path)
    with pytest.raises(RuntimeError):
        cache.store("optimize", "key", fails)
    assert cache.find("optimize", "key") is None
    assert list((tmp_path / "optimize").iterdir()) == []


def test_a_full_disk_is_said_so(tmp_path):
    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SpaceError, match="disk is full"):
        StageCache(tmp_path).store("optimize", "key", full)


def test_disabled_reads_nothing_and_still_writes(tmp_path):
    StageCache(tmp_path, enabled=False).store("optimize", "key", write("one"))
    assert StageCache(tmp_path, enabled=False).find("optimize", "key") is None
    assert StageCache(tmp_path).find("optimize", "key") is not None


def test_the_oldest_results_go(tmp_path):
    cache = StageCache(tmp_path)
    for i in range(15):
        folder = cache.store("optimize", f"key{i:02}", write(str(i)))
        os.utime(folder, (i, i))
    kept = sorted(p.name for p in (tmp_path / "optimize").iterdir())
    assert kept == [f"key{i:02}" for i in range(3, 15)]
