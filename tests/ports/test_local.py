"""This machine as a device."""

from __future__ import annotations

import os
import time

import pytest

from edgeopt.errors import DeviceError, TransferError
from edgeopt.ports.connect import connect
from edgeopt.ports.connection import CommandEnded
from edgeopt.ports.local import LocalConnection
from tests.conftest import wait_until


@pytest.fixture
def local():
    with connect(None) as connection:
        assert isinstance(connection, LocalConnection)
        yield connection


def test_a_command_gives_status_and_both_streams(local):
    done = local.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in", check=False)
    assert (done.status, done.stdout, done.stderr) == (3, b"in", b"err\n")
    assert done.complaint == "err"


def test_a_failure_is_told_with_its_complaint(local):
    with pytest.raises(DeviceError, match="ls failed with status 2.*No such file"):
        local.run(["ls", "/no/such/path"])


def test_death_by_a_signal_reads_as_in_a_shell(local):
    assert local.run(["sh", "-c", "kill -SEGV $$"], check=False).status == 128 + 11


def test_a_program_that_is_not_there_is_named(local):
    with pytest.raises(DeviceError, match="cannot run no-such-program"):
        local.run(["no-such-program"])


def test_a_command_that_outlasts_its_deadline_ends_with_its_children(local, tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(DeviceError, match="did not finish within 2 s"):
        local.run(["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], timeout_s=2)
    pid = int(pid_file.read_text())
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_files_go_there_and_back(local, tmp_path):
    data = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(data)
    moved = []
    local.put(tmp_path / "a", str(tmp_path / "b"), advance=moved.append)
    local.get(str(tmp_path / "b"), tmp_path / "c", advance=moved.append)
    assert (tmp_path / "c").read_bytes() == data and moved == [len(data), len(data)]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_what_is_in_the_way_is_named(local, tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TransferError, match="a directory is in the way") as refused:
        local.put(tmp_path / "a", str(tmp_path / "folder"))
    assert str(tmp_path / "folder") in str(refused.value)
    with pytest.raises(TransferError, match="Directory nonexistent|Not a directory"):
        local.put(tmp_path / "a", str(tmp_path / "a" / "b"))
    with pytest.raises(TransferError, match="No such file"):
        local.get(str(tmp_path / "none"), tmp_path / "here")
    assert sorted(os.listdir(tmp_path)) == ["a", "folder"]


def test_a_held_command_lives_as_long_as_its_block(local, tmp_path):
    mark = tmp_path / "mark"
    with local.hold(["sh", "-c", f"echo ready; cat; touch {mark}"]) as line:
        assert line == "ready" and not mark.exists()
    assert mark.exists()


def test_a_held_command_whose_block_was_left_by_an_error_ends_as_otherwise(local, tmp_path):
    """It is waited for, so that a lock or a folder of it is free; killed, a child of the shell may outlive it."""
    lock, mark = tmp_path / "lock", tmp_path / "mark"
    argv = ["sh", "-c", f"exec 9>{lock}; flock -n 9 || exit 75; echo ready; cat; touch {mark}"]
    with pytest.raises(ValueError, match="inside"), local.hold(argv):
        raise ValueError("inside")
    assert mark.exists() and local.run(["flock", "-n", str(lock), "true"], check=False).status == 0


def test_a_held_command_that_ends_early_tells_how(local):
    with pytest.raises(CommandEnded) as ended, local.hold(["sh", "-c", "echo no >&2; exit 75"]):
        pytest.fail("the block must not be entered")
    assert (ended.value.result.status, ended.value.result.complaint) == (75, "no")


def test_a_held_command_that_says_nothing_is_given_up(local):
    started = time.monotonic()
    with pytest.raises(DeviceError, match="within 0.3 s"), local.hold(["sleep", "60"], timeout_s=0.3):
        pytest.fail("the block must not be entered")
    assert time.monotonic() - started < 50


def test_home_is_expanded(local, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/ann")
    assert local.expand("~") == "/home/of/ann"
    assert local.expand("~/x y") == "/home/of/ann/x y"
    assert local.expand("/a/~") == "/a/~"


def test_output_goes_to_a_file(local, tmp_path):
    with open(tmp_path / "out", "wb") as sink:
        assert local.run(["echo", "hi"], stdout=sink).stdout == b""
    assert (tmp_path / "out").read_bytes() == b"hi\n"
