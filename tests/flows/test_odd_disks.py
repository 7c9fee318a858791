"""Devices whose disk is full, small or slow at the worst moment: told of, and nothing is left half written."""

from __future__ import annotations

import pytest

from edgeopt.errors import SpaceError
from edgeopt.flows.activate import activate
from edgeopt.flows.place import locked
from edgeopt.flows.push import push
from edgeopt.flows.validate import validate_at
from tests.flows.test_odd_devices import READ_ONLY_HOME, check, in_home, interpreter, reached, without
from tests.tiny import tiny_artifact


@pytest.fixture
def artifact(tmp_path):
    return tiny_artifact(tmp_path / "built", torchscript=False)


SMALL_DISK = "mkdir /run/disk && mount -t tmpfs -o size=8m,nr_inodes=200,mode=777 tmpfs /run/disk"
FILL = 'i=0; while true > "$1/fill$i"; do i=$((i + 1)); done 2>/dev/null; true'


@pytest.mark.parametrize("what", ["inodes", "bytes"])
def test_a_disk_that_fills_up_before_the_switch_leaves_the_old_release(odd, artifact, tmp_path, what):
    machine = odd(mounts=SMALL_DISK)
    other = tiny_artifact(tmp_path / "other", torchscript=False, metrics={"reference": {"accuracy": 0.5}})
    with reached(machine) as device:
        push(artifact, device, root="/run/disk")
        activate(device, "tiny", artifact.digest, root="/run/disk")
        push(other, device, root="/run/disk")
        fill = FILL if what == "inodes" else 'cat /dev/zero > "$1/fill" 2>/dev/null; true'
        device.run(["sh", "-c", fill, "sh", "/run/disk"])
        try:
            activate(device, "tiny", other.digest, root="/run/disk")
        except SpaceError as why:
            assert "disk is full" in str(why) and machine.address in str(why)
            current = artifact
        else:  # a link takes no room on some file systems
            current = other
        assert device.run(["readlink", "/run/disk/tiny/current"]).text == f"releases/{current.digest}"
        device.run(["sh", "-c", "rm /run/disk/fill*"])
        activate(device, "tiny", other.digest, root="/run/disk")
        assert device.run(["readlink", "/run/disk/tiny/current"]).text == f"releases/{other.digest}"


def test_a_disk_that_is_full_when_the_release_is_put_together_leaves_nothing(odd, artifact, tmp_path):
    machine = odd(mounts=SMALL_DISK)
    with reached(machine) as device:
        release = push(artifact, device, root="/run/disk").release
        device.run(["rm", "-rf", release])  # every blob is there, and no room for a folder
        device.run(["sh", "-c", FILL, "sh", "/run/disk"])
        with pytest.raises(SpaceError) as refused:
            push(artifact, device, root="/run/disk")
        assert machine.address in str(refused.value) and refused.value.todo
        assert device.run(["ls", "-A", "/run/disk/tiny/releases"]).text == ""
        device.run(["sh", "-c", "rm /run/disk/fill*"])
        assert push(artifact, device, root="/run/disk").moved_bytes == 0
        assert device.run(["sha256sum", f"{release}/manifest.json"]).text.split()[0] == artifact.digest


def test_a_disk_that_has_no_room_for_the_measurement_is_told_of(odd, artifact):
    mounts = f"{SMALL_DISK}\n{READ_ONLY_HOME}\nmount -t tmpfs -o size=4k,ro tmpfs /var/tmp"
    machine = odd(uid=0, mounts=mounts, environment=("TMPDIR=/run/disk",))
    with reached(machine) as device:
        push(artifact, device, root="/run/disk")
        device.run(["sh", "-c", 'cat /dev/zero > "$1/fill" 2>/dev/null; true', "sh", "/run/disk"])
        with (
            pytest.raises(SpaceError, match="disk is full"),
            locked(device, "/run/disk", "tiny") as place,
        ):
            validate_at(place, artifact, interpreter())


def test_a_disk_that_takes_long_to_flush_is_waited_for(odd, artifact):
    machine = odd(path="/run/machine/bin")
    without(machine, "sync")
    slow = '#!/bin/sh\nmkdir "$HOME/.slept" 2>/dev/null && sleep 3\nexec /bin/sync "$@"\n'
    (machine.folder / "bin" / "sync").write_text(slow)
    (machine.folder / "bin" / "sync").chmod(0o755)
    # one second of silence is all that the user would wait for
    with reached(machine, ServerAliveInterval=1, ServerAliveCountMax=1) as device:
        push(artifact, device)
    check(in_home(machine, artifact), artifact)
