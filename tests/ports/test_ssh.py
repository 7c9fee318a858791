"""A device over SSH, against a real OpenSSH server (cases S02 to S11 of the notes on SSH)."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from edgeopt.errors import DeviceError, HostError, TransferError
from edgeopt.ports.connect import connect
from edgeopt.ports.connection import CommandEnded
from edgeopt.ports.ssh import SSHConnection
from tests.conftest import absent, wait_until
from tests.relay import Relay


@pytest.fixture
def device(sshd, ssh_config):
    with connect("device", config=ssh_config(sshd)) as connection:
        yield connection


def ssh(config: Path, command: str) -> str:
    """What OpenSSH's own client gets: shows that a server is as strange as the test says."""
    argv = ["ssh", "-F", str(config), "device", command]
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def test_constructing_a_connection_does_no_io():
    connect("nowhere.invalid").close()


def test_a_command_gives_status_and_both_streams(device):
    done = device.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"it's\n", check=False)
    assert (done.status, done.stdout, done.stderr) == (3, b"it's\n", b"err\n")
    with pytest.raises(DeviceError, match="ls failed with status 2.*No such file"):
        device.run(["ls", "/no/such/path"])


def test_the_label_is_user_host_and_port(device, sshd):
    device.run(["true"])
    assert device.label.endswith(f"@127.0.0.1:{sshd.port}")


def test_files_go_there_and_back_and_home_is_the_devices(device, sshd, tmp_path):
    data = os.urandom(5_000_000)
    (tmp_path / "a").write_bytes(data)
    moved = []
    device.put(tmp_path / "a", "~/it's here", advance=moved.append)  # S04
    assert (sshd.home / "it's here").read_bytes() == data and sum(moved) == len(data)
    device.get("~/it's here", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    assert not list(sshd.home.glob("*.part")) and sorted(os.listdir(tmp_path)) == ["a", "b", "ssh_config"]
    assert device.expand("~") == str(sshd.home)


def test_an_empty_file_is_a_file(device, sshd, tmp_path):
    (tmp_path / "a").touch()
    device.put(tmp_path / "a", "~/empty")
    assert (sshd.home / "empty").read_bytes() == b""


def test_what_is_in_the_way_is_named(device, tmp_path):  # S02
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TransferError, match="a directory is in the way") as refused:
        device.put(tmp_path / "a", str(tmp_path / "folder"))
    assert str(tmp_path / "folder") in str(refused.value)
    with pytest.raises(TransferError, match="Directory nonexistent|Not a directory"):
        device.put(tmp_path / "a", str(tmp_path / "a" / "b"))
    with pytest.raises(TransferError, match="No such file"):
        device.get(str(tmp_path / "none"), tmp_path / "here")
    assert sorted(os.listdir(tmp_path)) == ["a", "folder", "ssh_config"]


def test_much_output_on_both_streams_arrives_whole(device):  # S08
    done = device.run(
        ["sh", "-c", "head -c 10000000 /dev/zero >&2; head -c 10000000 /dev/zero; cat"], stdin=b"x" * 5_000_000
    )
    assert (len(done.stdout), len(done.stderr)) == (15_000_000, 10_000_000)


def test_a_command_that_outlasts_its_deadline_is_stopped_on_the_device(device, tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(DeviceError, match="did not finish within 2 s and was stopped"):
        device.run(["sh", "-c", f"echo $$ > {pid_file}; exec sleep 60"], timeout_s=2)
    pid = int(pid_file.read_text())
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert device.run(["echo", "usable"]).text == "usable"


def test_a_held_command_lives_as_long_as_its_block(device, tmp_path):
    mark = tmp_path / "mark"
    with device.hold(["sh", "-c", f"echo ready; cat; touch {mark}"]) as line:
        assert line == "ready" and not mark.exists()
        assert device.run(["echo", "meanwhile"]).text == "meanwhile"
    assert mark.exists()
    with pytest.raises(CommandEnded) as ended, device.hold(["sh", "-c", "echo no >&2; exit 75"]):
        pytest.fail("the block must not be entered")
    assert (ended.value.result.status, ended.value.result.complaint) == (75, "no")


@pytest.mark.parametrize("noise", ["bashrc", "before and after"])
def test_a_noisy_login_pollutes_nothing(start_sshd, ssh_config, tmp_path, noise):  # S06
    if noise == "bashrc":
        if os.path.basename(pwd.getpwuid(os.getuid()).pw_shell) != "bash":
            absent("the login shell of this user is not bash")
        server = start_sshd("noisy")
        (server.home / ".bashrc").write_text("echo welcome\necho motd >&2\n")
    else:
        noisy = 'echo welcome; echo motd >&2; sh -c "$SSH_ORIGINAL_COMMAND"; echo bye; echo bye >&2'
        server = start_sshd("noisy", f"ForceCommand {noisy}")
    config = ssh_config(server)
    assert "welcome" in ssh(config, "true")
    (tmp_path / "a").write_bytes(b"\x00\xff" * 100_000)
    with connect("device", config=config) as device:
        done = device.run(["sh", "-c", "echo out; echo err >&2; exit 4"], check=False)
        assert (done.status, done.stdout, done.stderr) == (4, b"out\n", b"err\n")
        device.put(tmp_path / "a", "~/a")
        device.get("~/a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_fish_as_login_shell(start_sshd, ssh_config, tmp_path):  # S07
    if shutil.which("fish") is None:
        absent("fish is not installed")
    server = start_sshd("fish", 'ForceCommand exec fish -c "$SSH_ORIGINAL_COMMAND"')
    config = ssh_config(server)
    assert "posix" not in ssh(config, "d=/tmp; echo posix")
    (tmp_path / "a").write_bytes(b"data")
    with connect("device", config=config) as device:
        assert device.run(["sh", "-c", 'd=it\\\'s; printf \'%s\' "$d\\\\" "$1"', "sh", "'\\'"]).text == "it's\\'\\'"
        assert device.run(["false"], check=False).status == 1
        device.put(tmp_path / "a", "~/it's")
        assert (server.home / "it's").read_bytes() == b"data"


def test_a_login_shell_that_runs_nothing_is_told_in_words(start_sshd, ssh_config):
    server = start_sshd("nologin", "ForceCommand echo This account is not available.; exit 1")
    with connect("device", config=ssh_config(server)) as device, pytest.raises(HostError) as refused:
        device.run(["true"])
    assert "did not run the command: This account is not available." in str(refused.value)


def test_a_frozen_peer_ends_by_our_own_deadline(start_sshd, ssh_config):  # S09
    server = start_sshd("frozen")
    with SSHConnection("device", config=ssh_config(server), silence_s=0.7) as device:
        device.run(["true"])
        sessions = descendants(server.pid)
        assert sessions
        try:
            for pid in sessions:
                os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(HostError, match="fell silent"):
                device.run(["echo", "hi"], timeout_s=60)
            assert time.monotonic() - started < 5
        finally:
            for pid in sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("what", ["command", "upload", "held"])
def test_a_link_that_goes_silent_ends_by_our_own_deadline(sshd, ssh_config, tmp_path, what):
    (tmp_path / "a").write_bytes(bytes(20_000_000))
    with (
        Relay(sshd.port) as relay,
        SSHConnection("device", config=ssh_config(sshd, Port=relay.port), silence_s=0.7) as device,
    ):
        device.run(["true"])
        started = time.monotonic()
        with pytest.raises(HostError, match="fell silent.*"):
            if what == "command":
                relay.silent_after = 0
                device.run(["sleep", "60"], timeout_s=50)
            elif what == "upload":
                relay.silent_after = relay.to_server + 3_000_000
                device.put(tmp_path / "a", "~/silent")
            else:
                with device.hold(["sh", "-c", "echo ready; cat"]):
                    relay.silent_after = 0
        assert time.monotonic() - started < 6
    assert not (sshd.home / "silent").exists()


def test_a_link_that_is_cut_leaves_nothing_under_the_name(sshd, ssh_config, tmp_path):  # S03
    (tmp_path / "a").write_bytes(bytes(20_000_000))
    with (
        Relay(sshd.port, cut_after=3_000_000) as relay,
        connect("device", config=ssh_config(sshd, Port=relay.port)) as device,
        pytest.raises(TransferError, match="broke"),
    ):
        device.put(tmp_path / "a", "~/cut")
    assert wait_until(lambda: not list(sshd.home.glob("cut*")))


def test_a_command_that_is_quiet_for_long_is_not_taken_for_a_dead_link(sshd, ssh_config):
    with SSHConnection("device", config=ssh_config(sshd), silence_s=1) as device:
        assert device.run(["sh", "-c", "sleep 3; echo done"]).text == "done"


def test_a_port_where_nothing_listens(ssh_config, sshd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        refused = refusal(connect("device", config=ssh_config(sshd, Port=port)))
    assert "nothing listens" in refused and f"127.0.0.1:{port}" in refused


def test_a_name_that_nobody_knows(ssh_config, sshd):
    refused = refusal(connect("device", config=ssh_config(sshd, HostName="no-such-host.invalid")))
    assert "the name is not known" in refused and "no-such-host.invalid" in refused


def test_something_that_is_no_ssh_server(ssh_config, sshd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"220 mail ready\r\n" * 200), daemon=True).start()
        refused = refusal(connect("device", config=ssh_config(sshd, Port=server.getsockname()[1])))
    assert "no SSH server" in refused


def test_a_server_that_accepts_and_says_nothing(ssh_config, sshd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        refused = refusal(connect("device", config=ssh_config(sshd, Port=server.getsockname()[1], ConnectTimeout=1)))
    assert time.monotonic() - started < 14  # not the 15 s that a banner may take
    assert "cannot connect" in refused


def refusal(connection) -> str:
    with connection, pytest.raises(HostError) as refused:
        connection.run(["true"])
    assert refused.value.exit_code == 11 and refused.value.todo
    return str(refused.value)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, from /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, grew = {pid}, True
    while grew:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grew = found | more, bool(more)
    return sorted(found - {pid})
