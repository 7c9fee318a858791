"""One measurement at a time: real processes that contend for the machine's lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt.onboard import lock
from edgeopt.onboard.failures import Failure
from tests.conftest import wait_until

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys, time; from edgeopt.onboard import lock\n"
    "with lock.measuring(sys.argv[1], 20) as held: print(held, flush=True); sys.stdin.read()\n"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until its stdin ends."""
    path = str(tmp_path / "lock")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout.readline()
    yield child, path
    child.kill()
    child.wait()
    child.stdout.close()


def test_the_holder_is_named_and_nothing_runs_meanwhile(holder):
    child, path = holder
    with pytest.raises(Failure) as failed, lock.measuring(path, 0.3):
        pytest.fail("two measurements at once")
    assert failed.value.kind == "locked"
    assert failed.value.message == f"another measurement is going on: process {child.pid} holds {path}"


def test_a_waiting_one_goes_on_when_the_other_ends(holder):
    child, path = holder
    waiting = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert waiting.poll() is None
    child.stdin.close()
    assert b"'missing': None" in waiting.stdout.readline()
    with pytest.raises(Failure, match=f"process {waiting.pid} holds"), lock.measuring(path):
        pass
    waiting.communicate()
    with lock.measuring(path) as held:
        assert held["path"] == path


def test_the_lock_goes_with_a_process_that_is_killed(holder):
    child, path = holder
    os.kill(child.pid, signal.SIGKILL)
    with lock.measuring(path, 20) as held:
        assert held["missing"] is None


def test_every_user_may_take_the_file_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        with lock.measuring(str(tmp_path / "lock")):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666


def test_a_file_that_may_only_be_read_is_locked_all_the_same(holder, tmp_path):
    child, path = holder
    os.chmod(path, 0o444)
    with pytest.raises(Failure, match=f"process {child.pid} holds"), lock.measuring(path):
        pass


@pytest.mark.parametrize("kind", ["a link", "a pipe", "no folder"])
def test_what_is_no_plain_file_is_not_followed_and_the_answer_says_that_there_is_no_lock(tmp_path, kind):
    path = tmp_path / "lock"
    if kind == "a link":
        (tmp_path / "victim").write_text("precious")
        path.symlink_to(tmp_path / "victim")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path = tmp_path / "gone" / "lock"
    with lock.measuring(str(path)) as held:
        assert str(path) in held["missing"]
    assert kind != "a link" or (tmp_path / "victim").read_text() == "precious"


def test_the_machines_own_file_lies_where_every_user_may_write():
    path = lock.default_path()
    assert path is None or Path(path).parent.as_posix() in lock.FOLDERS
    assert wait_until(lambda: path is None or os.access(Path(path).parent, os.W_OK))
