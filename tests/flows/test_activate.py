"""Activate and rollback, over SSH to a real OpenSSH server and on this machine."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from edgeopt.errors import DeviceError, LockedError, TransferError, UsageError
from edgeopt.flows.activate import activate, rollback
from edgeopt.flows.place import locked
from edgeopt.flows.push import push
from edgeopt.ports.connect import connect
from tests.tiny import tiny_artifact


@pytest.fixture
def release(device, root, tmp_path):
    """release(**manifest fields): the digest of a new release of 'tiny' on the device."""
    made = []

    def make(**changes) -> str:
        made.append(None)
        changes.setdefault("metrics", {"reference": {"accuracy": len(made) / 100}})
        artifact = tiny_artifact(tmp_path / f"built{len(made)}", torchscript=False, **changes)
        return push(artifact, device, root=str(root), keep=10).digest

    return make


def links(root) -> tuple[str | None, str | None]:
    """The digests that current and previous point to."""
    found = []
    for name in ("current", "previous"):
        path = root / "tiny" / name
        found.append(os.readlink(path).removeprefix("releases/") if path.is_symlink() else None)
    return tuple(found)


def test_the_links_are_relative_and_previous_follows(device, root, release):
    a, b, c = release(), release(), release()
    done = activate(device, "tiny", a, root=str(root))
    assert (done.digest, done.previous, done.changed) == (a, None, True) and links(root) == (a, None)
    activate(device, "tiny", b, root=str(root))
    done = activate(device, "tiny", c[:12], root=str(root))
    assert (done.digest, done.previous) == (c, b) and links(root) == (c, b)
    assert (root / "tiny" / "current" / "manifest.json").is_file()
    assert os.readlink(root / "tiny" / "current") == f"releases/{c}"


def test_what_is_current_already_stays_and_keeps_its_previous(device, root, release):
    a, b = release(), release()
    activate(device, "tiny", a, root=str(root))
    activate(device, "tiny", b, root=str(root))
    done = activate(device, "tiny", b, root=str(root))
    assert (done.changed, done.previous) == (False, a) and links(root) == (b, a)


def test_rollback_goes_back_and_forth(device, root, release):
    a, b = release(), release()
    activate(device, "tiny", a, root=str(root))
    with pytest.raises(DeviceError, match="no previous release"):
        rollback(device, "tiny", root=str(root))
    activate(device, "tiny", b, root=str(root))
    assert rollback(device, "tiny", root=str(root)).digest == a and links(root) == (a, b)
    assert rollback(device, "tiny", root=str(root)).digest == b and links(root) == (b, a)


def test_which_release_is_meant_must_be_clear(device, root, release):
    with pytest.raises(DeviceError, match="nothing of that name is there"):
        activate(device, "tiny", root=str(root))
    assert not root.exists()
    a = release()
    assert activate(device, "tiny", root=str(root)).digest == a
    b = release()
    with pytest.raises(UsageError, match="several releases are meant") as refused:
        activate(device, "tiny", root=str(root))
    assert a[:12] in str(refused.value) and b[:12] in str(refused.value)
    with pytest.raises(DeviceError, match="no release 000000000000 is there"):
        activate(device, "tiny", "0" * 64, root=str(root))
    assert links(root) == (a, None)


def test_the_commands_of_the_release_run_in_its_folder(device, root, release, tmp_path):
    log = tmp_path / "log"
    a = release(
        after_activate=("sh", "-c", f'pwd >> "{log}"; echo "$1" >> "{log}"', "sh", "it's"),
        health=("sh", "-c", f'test -f manifest.json && echo healthy >> "{log}"'),
    )
    activate(device, "tiny", a, root=str(root))
    assert log.read_text().splitlines() == [str(root / "tiny" / "releases" / a), "it's", "healthy"]


@pytest.mark.parametrize("key", ["after_activate", "health"])
def test_a_command_that_fails_switches_back(device, root, release, tmp_path, key):
    log = tmp_path / "log"
    a = release(after_activate=("sh", "-c", f'echo a >> "{log}"'))
    b = release()
    bad = release(**{key: ("sh", "-c", "echo out of memory >&2; exit 9")})
    activate(device, "tiny", b, root=str(root))
    activate(device, "tiny", a, root=str(root))
    with pytest.raises(DeviceError) as failed:
        activate(device, "tiny", bad, root=str(root))
    message = str(failed.value)
    assert f"'{key}' command" in message and "status 9: out of memory" in message and a[:12] in message
    assert links(root) == (a, b)
    assert log.read_text() == "a\na\n"  # the old release's service is restarted with the old release
    assert (root / "tiny" / "releases" / bad).is_dir()


@pytest.mark.parametrize("key", ["after_activate", "health"])
def test_a_command_that_hangs_is_ended_and_switched_back(device, root, release, monkeypatch, key):
    for limit in ("AFTER_ACTIVATE_S", "HEALTH_S"):
        monkeypatch.setattr(f"edgeopt.flows.activate.{limit}", 1)
    a = release()
    hangs = release(**{key: ("sleep", "1000")})
    activate(device, "tiny", a, root=str(root))
    with pytest.raises(DeviceError, match="switched back.*did not finish within 1 s"):
        activate(device, "tiny", hangs, root=str(root))
    assert links(root) == (a, None) and not (root / "tiny" / "pending").exists()


def test_an_interrupted_operator_leaves_the_old_release(device, root, release, monkeypatch):
    """Ctrl-C while health is asked."""
    a, b = release(), release(health=("true",))
    activate(device, "tiny", a, root=str(root))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeopt.flows.activate._prove", interrupt)
    with pytest.raises(KeyboardInterrupt):
        activate(device, "tiny", b, root=str(root))
    assert links(root) == (a, None) and not (root / "tiny" / "pending").exists()


def test_many_devices_in_threads_do_not_disturb_each_other(sshd, ssh_config, root, tmp_path):
    config = ssh_config(sshd)
    artifact = tiny_artifact(tmp_path / "built", torchscript=False, health=("test", "-f", "manifest.json"))

    def one(i: int) -> str:
        with connect("device", config=config) as device:
            push(artifact, device, root=str(root / str(i)))
            return activate(device, "tiny", root=str(root / str(i))).current_link

    with ThreadPoolExecutor(4) as pool:
        for i, link in enumerate(pool.map(one, range(4))):
            assert os.readlink(link) == f"releases/{artifact.digest}" and str(root / str(i)) in link


def test_a_first_release_that_fails_leaves_none_active(device, root, release):
    bad = release(health=("false",))
    with pytest.raises(DeviceError, match="no release is current"):
        activate(device, "tiny", bad, root=str(root))
    assert links(root) == (None, None)


def test_a_release_with_another_manifest_is_refused(device, root, release):
    a, b = release(), release()
    activate(device, "tiny", a, root=str(root))
    path = root / "tiny" / "releases" / b / "manifest.json"
    os.unlink(path)
    path.write_bytes((root / "tiny" / "releases" / a / "manifest.json").read_bytes())
    with pytest.raises(DeviceError, match="not the one it was pushed with"):
        activate(device, "tiny", b, root=str(root))
    assert links(root) == (a, None)


def test_what_is_in_the_way_of_current_is_named(device, root, release):
    a = release()
    (root / "tiny" / "current").mkdir()
    with pytest.raises(TransferError, match="cannot switch the release.*current"):
        activate(device, "tiny", a, root=str(root))
    assert (root / "tiny" / "current").is_dir()


def test_while_another_is_at_work_nothing_is_switched(device, root, release):
    a = release()
    with locked(connect(None), str(root), "tiny"), pytest.raises(LockedError):
        activate(device, "tiny", a, root=str(root))
    assert links(root) == (None, None)


def test_there_is_no_moment_without_a_current_release(device, root, release):
    a, b = release(), release()
    activate(device, "tiny", a, root=str(root))
    current = root / "tiny" / "current" / "manifest.json"
    over, seen, gone = threading.Event(), 0, 0

    def watch():
        nonlocal seen, gone
        while not over.is_set():
            seen += 1
            gone += not current.is_file()

    watcher = threading.Thread(target=watch)
    watcher.start()
    for digest in (b, a, b, a):
        activate(device, "tiny", digest, root=str(root))
    over.set()
    watcher.join()
    assert seen > 100 and gone == 0
