"""The device on this machine that the demo and the tests log in to."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import SCRIPTS, wait_until


def call(*args) -> subprocess.CompletedProcess:
    argv = [sys.executable, SCRIPTS / "loopback_sshd.py", *args]
    return subprocess.run([str(a) for a in argv], capture_output=True, text=True)


def test_up_prints_the_login_and_down_stops_it(loopback, tmp_path):
    try:
        login = call("up", tmp_path).stdout.split()
        said = subprocess.run([*login, 'echo "$HOME"'], capture_output=True, text=True)
        assert said.stdout.strip() == str(tmp_path / "home"), said.stderr
        pid = int((tmp_path / "sshd.pid").read_text())
    finally:
        assert call("down", tmp_path).stdout == "stopped\n"
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert call("down", tmp_path).stdout == "was not running\n"


def test_up_twice_leaves_one_server_and_the_same_keys(loopback, tmp_path):
    try:
        first = loopback.up(tmp_path)
        key = (tmp_path / "host_key").read_bytes()
        second = loopback.up(tmp_path)
        assert wait_until(lambda: not os.path.exists(f"/proc/{first.pid}"))
        assert os.path.exists(f"/proc/{second.pid}") and (tmp_path / "host_key").read_bytes() == key
    finally:
        loopback.down(tmp_path)


def test_down_leaves_a_process_alone_that_is_not_its_server(loopback, tmp_path):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (tmp_path / "sshd.pid").write_text(str(stranger.pid))
        assert loopback.down(tmp_path) is False
        assert stranger.poll() is None
        stranger.kill()


def test_the_keys_are_private(sshd):
    assert (sshd.folder / "client_key").stat().st_mode & 0o077 == 0


def test_wrong_arguments_are_answered_with_the_usage(loopback):
    done = call("sideways")
    assert done.returncode == 2 and "loopback_sshd.py up DIR" in done.stderr
