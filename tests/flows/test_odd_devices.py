"""Devices that are odd: each works, or is refused in one sentence that says what to do; nothing is left half written.

Each is a machine of its own, a real sshd with a real user in namespaces (tests/machine.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from edgeopt.errors import DeviceError, HostError, TransferError
from edgeopt.flows.activate import activate
from edgeopt.flows.place import locked
from edgeopt.flows.push import push
from edgeopt.flows.validate import How, validate_at
from edgeopt.ports.connect import connect
from edgeopt.runtime.artifact import Artifact
from tests import pythons
from tests.conftest import absent, wait_until
from tests.machine import Machine, programs
from tests.tiny import tiny_artifact

# what a device needs for a push, see docs/device.md
NEEDED = (
    *("sh", "cat", "chmod", "cp", "date", "dd", "df", "find", "flock", "head", "ln", "ls", "mkdir", "mktemp", "mv"),
    *("openssl", "readlink", "rm", "rmdir", "sed", "sleep", "stat", "sync", "tail", "touch", "tr", "wc"),
)


@pytest.fixture
def artifact(tmp_path):
    return tiny_artifact(tmp_path / "built", torchscript=False)


def reached(machine: Machine, **options):
    return connect("device", config=machine.config(**options))


def check(release: Path | str, artifact: Artifact) -> None:
    assert Artifact.open(release).digest == artifact.digest


def in_home(machine: Machine, artifact: Artifact) -> Path:
    return machine.home / ".edgeopt" / "tiny" / "releases" / artifact.digest


@pytest.mark.parametrize("shell", ["/usr/bin/fish", "/bin/rbash", "/bin/dash"])
def test_login_shells(odd, artifact, shell):  # S07
    if not os.path.exists(shell):
        absent(f"{shell} is not installed")
    machine = odd(shell=shell)
    with reached(machine) as device:
        push(artifact, device)
        assert device.run(["printf", "%s", "it's $HOME \\ \n~ *"]).stdout == b"it's $HOME \\ \n~ *"
    check(in_home(machine, artifact), artifact)


def test_an_account_that_greets_on_every_login(odd, artifact):  # S06
    machine = odd(settings=("Banner /run/machine/banner", "PrintMotd yes"))
    (machine.folder / "banner").write_text("Unauthorised use is a crime.\n" * 20)
    (machine.home / ".bashrc").write_text("echo; echo Welcome; echo you have mail >&2; printf no-newline\n")
    with reached(machine) as device:
        push(artifact, device)
        assert device.run(["echo", "plain"]).stdout == b"plain\n"
    check(in_home(machine, artifact), artifact)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("internal-sftp", "the account is for SFTP only"),
        ("/usr/lib/openssh/sftp-server", "the account is for SFTP only"),
        ("/bin/false", "did not run the command and said nothing"),
        ("echo no shell here", "did not run the command: no shell here"),
        ("sleep 1000", "did not start the command within 3 s"),
    ],
)
def test_an_account_that_runs_no_commands_is_refused_with_the_reason(odd, artifact, command, words):
    machine = odd(settings=(f"ForceCommand {command}",))
    with reached(machine, ConnectTimeout=1) as device, pytest.raises(HostError, match=words) as refused:
        push(artifact, device)
    assert device.label in str(refused.value) and refused.value.todo
    assert list(machine.home.iterdir()) == []


def test_a_host_without_sftp(odd, artifact):
    machine = odd(sftp=None)
    with reached(machine) as device:
        push(artifact, device)
    check(in_home(machine, artifact), artifact)


def test_one_session_at_a_time_is_enough(odd, artifact, tmp_path):
    machine = odd(settings=("MaxSessions 1",))
    with reached(machine) as device:
        push(artifact, device)
        with device.hold(["sh", "-c", "echo held; cat"]) as line, device.hold(["sh", "-c", "echo too; cat"]) as other:
            assert (line, other, device.run(["echo", "third"]).text) == ("held", "too", "third")
        activate(device, "tiny")
    check(in_home(machine, artifact), artifact)


def test_no_session_at_all_is_told_of(odd, artifact):
    with reached(odd(settings=("MaxSessions 0",))) as device, pytest.raises(HostError, match="allows no session"):
        push(artifact, device)


def without(machine: Machine, *names: str) -> None:
    programs(machine.folder / "bin", *(name for name in NEEDED if name not in names))


def test_without_python_a_push_works_and_validate_says_what_is_missing(odd, artifact):
    machine = odd(path="/run/machine/bin")
    without(machine)
    with reached(machine) as device, locked(device, None, "tiny") as place:
        with pytest.raises(DeviceError, match="there is no 'python3'") as refused:
            validate_at(place, artifact)
        assert "3.6 or newer" in refused.value.todo
    check(in_home(machine, artifact), artifact)


def test_a_python_that_is_too_old_is_named_with_the_oldest_that_will_do(odd, artifact):
    old = pythons.require("2.7")
    machine = odd(path="/run/machine/bin", uid=0)  # the interpreter may lie where only root looks
    without(machine)
    (machine.folder / "bin" / "python3").write_text(f'#!/bin/sh\nexec {old} "$@"\n')
    (machine.folder / "bin" / "python3").chmod(0o755)
    with (
        reached(machine) as device,
        locked(device, None, "tiny") as place,
        pytest.raises(DeviceError, match="needs Python 3.6 or newer, this is 2.7"),
    ):
        validate_at(place, artifact)
    check(in_home(machine, artifact), artifact)


def test_busybox_and_nothing_else_is_a_device_to_run_on(odd, tmp_path):
    busybox = shutil.which("busybox")
    if busybox is None:
        absent("busybox is not installed")
    machine = odd(path="/run/machine/bin", shell="/run/machine/bin/sh")
    (machine.folder / "bin").mkdir()
    shutil.copy(busybox, machine.folder / "bin" / "busybox")
    subprocess.run([machine.folder / "bin" / "busybox", "--install", "-s", machine.folder / "bin"], check=True)
    for link in (machine.folder / "bin").iterdir():
        if link.is_symlink():
            link.unlink()
            link.symlink_to("busybox")
    (tmp_path / "a").write_bytes(os.urandom(200_000))
    with reached(machine) as device:
        assert "BusyBox" in device.run(["busybox"]).text
        device.put(tmp_path / "a", "~/it's a file")
        device.get("~/it's a file", tmp_path / "b")
        with pytest.raises(DeviceError, match="was stopped"):
            device.run(["sleep", "50"], timeout_s=1)
        assert wait_until(lambda: not any("sleep" in name for name in commands(machine)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def commands(machine: Machine) -> list[str]:
    found = []
    for pid in machine.processes():
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


READ_ONLY_HOME = """\
mount --bind /home/device /home/device
mount -o remount,bind,ro /home/device
mkdir /run/data && chmod 777 /run/data
"""


def test_a_read_only_home_is_named_and_another_root_works(odd, artifact):
    machine = odd(mounts=READ_ONLY_HOME)
    with reached(machine) as device:
        with pytest.raises(TransferError, match="Read-only file system") as refused:
            push(artifact, device)
        assert "--root" in refused.value.todo and "tiny" in refused.value.where
        done = push(artifact, device, root="/run/data/edgeopt")
        assert device.run(["sha256sum", f"{done.release}/manifest.json"]).text.split()[0] == artifact.digest
    assert list(machine.home.iterdir()) == []


def test_a_home_that_does_not_exist_is_named_and_another_root_works(odd, artifact):
    machine = odd(home_path="/nowhere/at/all", mounts="mkdir /run/data && chmod 777 /run/data")
    with reached(machine) as device:
        with pytest.raises(TransferError, match="/nowhere") as refused:
            push(artifact, device)
        assert "--root" in refused.value.todo
        done = push(artifact, device, root="/run/data")
        assert device.run(["sha256sum", f"{done.release}/manifest.json"]).text.split()[0] == artifact.digest


@pytest.mark.parametrize("umask", ["000", "077"])
def test_whatever_the_umask_nobody_else_may_write(odd, artifact, umask):
    machine = odd()
    (machine.home / ".bashrc").write_text(f"umask {umask}\n")
    with reached(machine) as device:
        assert device.run(["sh", "-c", "umask"]).text == {"000": "0022", "077": "0077"}[umask]
        push(artifact, device)
        activate(device, "tiny")
    check(in_home(machine, artifact), artifact)
    made = [path for path in (machine.home / ".edgeopt").rglob("*") if not path.is_symlink()]
    assert made and not [path for path in made if path.stat().st_mode & 0o022]
    if umask == "077":
        assert (machine.home / ".edgeopt").stat().st_mode & 0o077 == 0


ODD_PATHS = [
    "with space",
    'it\'s "quoted"',
    "new\nline",
    "-rf",
    "日本語",
    "$HOME `id` *",
    "~root",
    "back\\slash",
    "é" * 20,
]


@pytest.mark.parametrize("shell", ["/bin/bash", "/usr/bin/fish"])
def test_every_path_is_taken_as_it_is(odd, tmp_path, shell):
    machine = odd(shell=shell, environment=("LC_ALL=POSIX",))
    (tmp_path / "a").write_bytes(b"data")
    with reached(machine) as device:
        for name in ODD_PATHS:
            remote = name if name.startswith("-") else f"~/{name}"
            device.put(tmp_path / "a", remote)
            device.get(remote, tmp_path / "b")
            assert (tmp_path / "b").read_bytes() == b"data"
            (tmp_path / "b").unlink()
    made = {path.name for path in machine.home.iterdir()} - {".config", ".local", ".cache"}  # fish's own
    assert made == set(ODD_PATHS)


def test_another_users_home_is_found_and_an_unknown_user_is_not(odd):
    with reached(odd()) as device:
        assert device.expand("~device/x") == "/home/device/x" and device.expand("~root") == "/root"
        assert device.expand("~/~root") == "/home/device/~root"
        with pytest.raises(DeviceError, match="there is no user 'nobody-here'"):
            device.expand("~nobody-here/x")


def test_a_clock_that_was_wrong_does_not_make_old_releases_new(odd, tmp_path):
    machine = odd()
    artifacts = [
        tiny_artifact(tmp_path / str(i), torchscript=False, metrics={"reference": {"accuracy": i / 10}})
        for i in range(3)
    ]
    with reached(machine) as device:
        push(artifacts[0], device, keep=2)
        os.utime(in_home(machine, artifacts[0]), (2**31, 2**31))  # as if it was pushed in 2038
        push(artifacts[1], device, keep=2)
        done = push(artifacts[2], device, keep=2)
    assert done.pruned == (artifacts[0].digest,)
    check(in_home(machine, artifacts[1]), artifacts[1])


def test_sudo_without_a_terminal_fails_at_once_and_says_what_to_do(odd):  # S12
    if shutil.which("sudo") is None:
        absent("sudo is not installed")
    with reached(odd()) as device:
        started = time.monotonic()
        for argv in (["sudo", "-n", "true"], ["sudo", "true"]):
            with pytest.raises(DeviceError, match="sudo: .*required") as refused:
                device.run(argv, timeout_s=300)
            assert "NOPASSWD" in refused.value.todo
        assert time.monotonic() - started < 60


def test_nothing_of_ours_is_forwarded(odd, tmp_path):
    machine = odd(settings=("AllowAgentForwarding yes", "X11Forwarding yes"))
    said = subprocess.run(["ssh-agent", "-a", tmp_path / "agent"], capture_output=True, text=True, check=True)
    pid = int(said.stdout.split("SSH_AGENT_PID=")[1].split(";")[0])
    try:
        config = machine.config(ForwardAgent="yes", ForwardX11="yes", LocalForward=None)
        config.write_text(config.read_text().replace("  LocalForward None\n", ""))
        with connect("device", config=config) as device:
            found = device.run(["env"]).text
        assert "SSH_CONNECTION" in found and "SSH_AUTH_SOCK" not in found and "DISPLAY" not in found
    finally:
        os.kill(pid, 15)


# the runner


def interpreter() -> How:
    import sys

    return How(python=sys.executable, rounds=1, calls=2)


SMALL_TMP = "mkdir /run/small && mount -t tmpfs -o size=4k,noexec tmpfs /run/small && echo full > /run/small/file"


def test_a_full_tmp_is_got_round_and_noexec_does_not_matter(odd, artifact):
    machine = odd(uid=0, mounts=SMALL_TMP, environment=("TMPDIR=/run/small",))
    with reached(machine) as device, locked(device, None, "tiny") as place:
        assert validate_at(place, artifact, interpreter()).report.verdict != "fail"
        assert ".edgeopt-" not in device.run(["ls", "-A", "/run/small"]).text
    assert not [path for path in machine.home.rglob("*") if ".edgeopt-" in path.name]


def test_a_device_that_reboots_while_it_measures_is_told_of_and_measured_again(odd, artifact):
    machine = odd(uid=0)
    config = machine.config()
    how = How(python=interpreter().python, rounds=1000, calls=1000)
    with connect("device", config=config) as device, locked(device, None, "tiny") as place:
        push_there = threading.Thread(
            target=lambda: (
                wait_until(lambda: any("response.json" in name for name in commands(machine))) and machine.power_cut()
            )
        )
        push_there.start()
        with pytest.raises(TransferError, match="the connection (broke|was lost)") as broken:
            validate_at(place, artifact, how)
        push_there.join()
        assert machine.address in str(broken.value)
    machine.up()
    check(in_home(machine, artifact), artifact)
    with connect("device", config=config) as device, locked(device, None, "tiny") as place:
        assert validate_at(place, artifact, interpreter()).report.verdict != "fail"
