"""The lock of a device and name: who holds it, how it goes with its owner, and devices that have little."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from edgeopt.errors import DeviceError, EdgeoptError, LockedError
from edgeopt.flows import journal, place_scripts
from edgeopt.flows.activate import activate, rollback
from edgeopt.flows.place import Place, locked
from edgeopt.flows.push import push
from edgeopt.flows.status import collect, status
from edgeopt.ports.connect import connect
from edgeopt.ports.connection import CommandEnded, script
from edgeopt.ports.posix import RENAME, with_functions
from edgeopt.runtime.artifact import Artifact
from tests.conftest import absent, wait_until
from tests.relay import Relay
from tests.tiny import tiny_artifact

# busybox's own sh finds its applets without a PATH, so they are linked, and nothing else is
APPLETS = (*place_scripts.PROGRAMS.split(), "sh", "stat", "sha256sum", "du", "grep", "gzip", "test")


def programs_of(folder: Path, multicall: str, names) -> Path:
    """A folder with nothing but links to a multi-call binary."""
    binary = shutil.which(multicall)
    if binary is None:
        absent(f"{multicall} is not installed")
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(binary)
    return folder


def lock_argv(root: Path, patience_s: int = 120) -> list[str]:
    return script(place_scripts.LOCK, str(root), "tiny", "me", "make", "token", "", str(patience_s))


def is_free(connection, root: Path) -> bool:
    try:
        with locked(connection, str(root), "tiny"):
            return True
    except LockedError:
        return False


@pytest.fixture(params=["busybox", "no-flock"])
def little(request, tmp_path, monkeypatch):
    """This machine with busybox only, and with coreutils but no flock; the lock is a link then."""
    if request.param == "busybox":
        programs = programs_of(tmp_path / "bin", "busybox", APPLETS)
    else:
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in APPLETS:
            (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))
    with connect(None) as here:
        yield here


def test_a_device_with_little_is_enough(little, root, tmp_path):
    a = tiny_artifact(tmp_path / "a", torchscript=False)
    b = tiny_artifact(tmp_path / "b", torchscript=False, profile="arm64-cpu", health=("test", "-f", "manifest.json"))
    for artifact in (a, b):
        push(artifact, little, root=str(root))
        activate(little, "tiny", artifact.digest, root=str(root))
    assert Artifact.open(root / "tiny" / "current").digest == b.digest
    assert rollback(little, "tiny", root=str(root)).digest == a.digest
    bad = tiny_artifact(tmp_path / "bad", torchscript=False, health=("false",))
    push(bad, little, root=str(root))
    with pytest.raises(DeviceError, match="switched back"):
        activate(little, "tiny", bad.digest, root=str(root))
    found = status(little, root=str(root))
    assert [r.digest for r in found.names[0].releases if r.current] == [a.digest] and found.leftovers == ()
    assert collect(little, root=str(root)).removed == ()


def test_without_flock_the_lock_is_as_good(little, root):
    with locked(little, str(root), "tiny"):
        assert not is_free(little, root)
        assert status(little, root=str(root)).names[0].locked_by
        with pytest.raises(LockedError, match="somebody is at work"):
            collect(little, root=str(root))
    assert is_free(little, root) and not list(root.rglob("*.held"))


@pytest.mark.parametrize("owner", ["2147483646.1.-", "dead", "another-boot"])
def test_a_lock_whose_owner_died_is_taken_over(little, root, owner):
    (root / "tiny" / "releases").mkdir(parents=True)
    if owner == "dead":
        child = subprocess.Popen(["sh", "-c", "exit"])
        child.wait()
        owner = f"{child.pid}.1.boot"
    elif owner == "another-boot":
        owner = f"{os.getpid()}.1.another"  # lives, but is not who took it
    (root / "tiny" / "lock.held").symlink_to(owner)
    assert is_free(little, root)


def test_only_one_of_many_gets_the_lock(little, root):
    (root / "tiny" / "releases").mkdir(parents=True)
    (root / "tiny" / "lock.held").symlink_to("2147483646.1.-")
    got, barrier, over = [], threading.Barrier(6, timeout=60), threading.Barrier(6, timeout=60)

    def attempt():
        barrier.wait()
        try:
            with locked(little, str(root), "tiny"):
                got.append(True)
                over.wait()
        except LockedError:
            got.append(False)
            over.wait()

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6 and sum(got) <= 1
    assert is_free(little, root)


def test_a_vanished_operator_loses_the_lock(sshd, ssh_config, root):
    """The link goes silent and nothing is closed, as when the operator's machine loses its power."""
    freed = False
    with contextlib.ExitStack() as stack, connect("device", config=ssh_config(sshd)) as other:
        relay = stack.enter_context(Relay(sshd.port))
        config = ssh_config(sshd, "relayed", Port=relay.port)
        device = stack.enter_context(connect("device", config=config))
        hold = device.hold(lock_argv(root, patience_s=2), beat_s=0.2)
        with contextlib.suppress(EdgeoptError, ConnectionError), hold:
            assert not is_free(other, root)
            relay.silent_after = 0
            freed = wait_until(lambda: is_free(other, root))
            relay.cut()
            raise ConnectionError  # as any use of the link would find out
    assert freed


def test_an_operator_who_is_heard_keeps_the_lock(sshd, ssh_config, root):
    """For longer than the device's patience, which must be long enough for a busy machine."""
    with connect("device", config=ssh_config(sshd)) as device, connect(None) as other:
        with device.hold(lock_argv(root, patience_s=4), beat_s=0.1):
            beats = threading.Event()
            threading.Timer(6, beats.set).start()
            assert beats.wait(30) and not is_free(other, root)
        assert is_free(other, root)


def test_who_lost_the_lock_changes_nothing(device, root, tmp_path):
    artifact = tiny_artifact(tmp_path / "a", torchscript=False)
    push(artifact, device, root=str(root))
    with locked(device, str(root), "tiny") as place:
        (root / "tiny" / "lock").write_text("somebody@else\nanother token\n")
        for step in (
            lambda: place.point(artifact.digest, None),
            lambda: place.prune([artifact.digest]),
            lambda: place.stage("0" * 64, {}, b""),
            lambda: place.settle(artifact.digest, "proven"),
        ):
            with pytest.raises(LockedError, match="not ours any more.*somebody@else"):
                step()
    assert not (root / "tiny" / "current").exists() and os.listdir(root / "tiny" / "releases") == [artifact.digest]


def test_waiting_for_the_lock_serialises_two_operators(device, root, tmp_path):
    artifact = tiny_artifact(tmp_path / "a", torchscript=False)
    free = threading.Event()

    def hold():
        with connect(None) as here, locked(here, str(root), "tiny"):
            taken.set()
            free.wait(60)

    taken = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)
    threading.Timer(0.2, free.set).start()
    try:
        assert push(artifact, device, root=str(root), wait_s=60).digest == artifact.digest
    finally:
        free.set()
        holder.join()


def test_what_a_service_inherits_is_not_the_lock(device, root, tmp_path):
    """after_activate leaves a process behind; the undo of a switch too must not hand it the lock."""
    stay = ("sh", "-c", "sleep 1000 </dev/null >/dev/null 2>&1 & echo $! >> ../../pids")
    old = tiny_artifact(tmp_path / "old", torchscript=False, after_activate=stay)
    new = tiny_artifact(tmp_path / "new", torchscript=False, profile="arm64-cpu")
    try:
        for artifact in (old, new):
            push(artifact, device, root=str(root))
        activate(device, "tiny", old.digest, root=str(root))
        with locked(device, str(root), "tiny") as place:
            place.try_out(new.digest, old.digest, place.state(), stay)  # and then nothing is heard of us
        assert os.readlink(root / "tiny" / "current") == f"releases/{old.digest}"
        assert is_free(device, root)
        assert len((root / "tiny" / "pids").read_text().split()) == 2
    finally:
        for pid in (root / "tiny" / "pids").read_text().split():
            os.kill(int(pid), 9)


@pytest.mark.parametrize("help_with", ["-h", "python3", "perl", None])
def test_a_link_is_switched_in_one_step_without_mv_T(tmp_path, monkeypatch, help_with):
    """macOS's mv has -h instead; others have Python or Perl."""
    programs = tmp_path / "bin"
    programs.mkdir()
    mv = f"""#!/bin/sh
case $1 in
  -T | -fT) echo "mv: illegal option -- T" >&2; exit 64 ;;
  -h | -fh) [ "{help_with}" = -h ] || {{ echo "mv: illegal option -- h" >&2; exit 64; }}
    [ $# -gt 1 ] || {{ echo "usage: mv [-f] source target" >&2; exit 64; }}
    shift; exec {shutil.which("mv")} -fT "$@" ;;
esac
exec {shutil.which("mv")} "$@"
"""
    (programs / "mv").write_text(mv)
    (programs / "mv").chmod(0o755)
    for name in ("sh", *([help_with] if help_with in ("python3", "perl") else [])):
        path = shutil.which(name, path="/usr/bin:/bin")
        if path is None:
            absent(f"{name} is not installed")
        (programs / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(programs))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "current").symlink_to("a")
    (tmp_path / "new").symlink_to("b")
    text = with_functions(RENAME, text='rename "$1" "$2"')
    done = connect(None).run(script(text, str(tmp_path / "new"), str(tmp_path / "current")), check=False)
    if help_with is None:
        assert done.status != 0 and "to switch a link in one step" in done.complaint
    else:
        assert done.status == 0, done.stderr
    assert os.readlink(tmp_path / "current") == ("a" if help_with is None else "b")
    assert os.listdir(tmp_path / "a") == []


def test_nothing_is_writable_for_others_whatever_the_umask(root, tmp_path):
    before = os.umask(0)
    try:
        push(tiny_artifact(tmp_path / "a", torchscript=False), connect(None), root=str(root))
    finally:
        os.umask(before)
    assert [p for p in root.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o022] == []


def test_the_journal_tells_what_was_done_and_forgives_a_torn_line(device, root, tmp_path):
    artifact = tiny_artifact(tmp_path / "a", torchscript=False, health=("true",))
    push(artifact, device, root=str(root))
    path = root / ".journal"
    with open(path, "a") as f:
        f.write('{"when": "2026-01-01T00:0')  # a power cut
    activate(device, "tiny", root=str(root))
    entries = journal.parse(path.read_text())
    steps = [(e.step, e.result) for e in entries]
    assert steps == [
        ("push", "begun"), ("push", "staged"), ("activate", "begun"),
        ("activate", "switched, to be proven"), ("activate", "proven"),
    ]  # fmt: skip
    assert {e.digest for e in entries if e.digest} == {artifact.digest} and all("@" in e.who for e in entries)
    with pytest.raises(DeviceError):
        rollback(device, "tiny", root=str(root))
    assert journal.parse(path.read_text())[-1].result == "failed: there is no previous release to return to"


def test_the_journal_stays_small(device, root):
    (root / "tiny" / "releases").mkdir(parents=True)
    (root / ".journal").write_text("x" * (256 << 10))
    with locked(device, str(root), "tiny", step="push"):
        pass
    assert (root / ".journal.1").stat().st_size > 256 << 10 and not (root / ".journal").exists()
    with locked(device, str(root), "tiny", step="push"):
        pass
    assert len(journal.parse((root / ".journal").read_text())) == 1


def test_a_command_that_ends_at_once_gives_its_reason(device, root, tmp_path):
    with pytest.raises(CommandEnded, match="nope"), device.hold(script("echo nope >&2; exit 3"), beat_s=1):
        pass


def test_a_place_without_a_token_is_not_fenced(device, root, tmp_path):
    artifact = tiny_artifact(tmp_path / "a", torchscript=False)
    done = push(artifact, device, root=str(root))
    Place(device, done.root, "tiny").point(artifact.digest, None)
    assert os.readlink(root / "tiny" / "current") == f"releases/{artifact.digest}"
