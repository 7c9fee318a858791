"""A push and an activation whose device loses its power: what it runs after the boot, and what it holds.

The power is cut after each command that the operator's side sends, once each, and in the middle of a transfer. What the
device's kernel has not written to its disk by then is lost.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgeopt.errors import EdgeoptError
from edgeopt.flows.activate import activate
from edgeopt.flows.push import push
from edgeopt.ports.connection import script
from edgeopt.ports.ssh import SSHConnection
from edgeopt.progress import Progress
from tests.tiny import tiny_artifact

pytestmark = pytest.mark.machine

NAME, ROOT = "tiny", "/home/nvidia/.edgeopt"
_BYTES = 6 << 20

# Every file under a final name: its hash and its path.
_LOOK = """\
cd "$1" && readlink tiny/current
find blobs/sha256 tiny/releases -type f | sort | while read -r path; do sha256sum "$path"; done
"""


class PowerFailure(Exception):
    """The moment came; the flow that was under way learns of it as of any connection that breaks."""


class Cutting(SSHConnection):
    """A connection whose device loses its power once `at` commands have ended."""

    def __init__(self, device, at: int | None):
        super().__init__(device.host, config=device.config, silence_s=120)
        self.device, self.at, self.ended = device, at, 0

    def run(self, *args, **how):
        done = super().run(*args, **how)
        self.ended += 1
        if self.ended == self.at:
            self.device.power_cut()
        return done


class CutWhile(Progress):
    """Cuts the power once so many bytes of an upload have moved."""

    def __init__(self, device, after: int):
        super().__init__(quiet=True)
        self.device, self.left = device, after

    def bar(self, *args, **how):
        manager = super().bar(*args, **how)
        return _Counted(manager, self)


class _Counted:
    def __init__(self, manager, progress):
        self.manager, self.progress = manager, progress

    def __enter__(self):
        advance = self.manager.__enter__()

        def counted(amount, *args, **how):
            self.progress.left -= amount
            if self.progress.left < 0 and self.progress.device.pid:
                self.progress.device.power_cut()
            return advance(amount, *args, **how)

        return counted

    def __exit__(self, *why):
        return self.manager.__exit__(*why)


def version(folder, number: int):
    """An artifact that differs from every other version in a file of 6 MB."""
    data = np.random.default_rng(number).bytes(_BYTES)
    return tiny_artifact(folder / str(number), name=NAME, torchscript=False, extra={"data.bin": data})


def put_in_place(device, artifact, at: int | None = None) -> Cutting:
    with Cutting(device, at) as connection:
        push(artifact, connection)
        activate(connection, NAME, artifact.digest)
    return connection


def check(device, artifacts) -> str:
    """The digest that runs; fails where a file under a final name is not what its name or its manifest says."""
    with SSHConnection(device.host, config=device.config, silence_s=120) as connection:
        said = connection.run(script(_LOOK, ROOT), timeout_s=300).text.splitlines()
    files = {path: sha256 for sha256, _, path in (line.partition("  ") for line in said[1:])}
    for path, sha256 in files.items():
        if path.startswith("blobs/") and not path.endswith(".part"):
            assert path.rpartition("/")[2] == sha256, f"{path} is partial"
    by_digest = {artifact.digest: artifact for artifact in artifacts}
    current = said[0].rpartition("/")[2]
    for digest in {path.split("/")[2] for path in files if path.startswith("tiny/releases/")} & set(by_digest):
        below = f"tiny/releases/{digest}/"
        for name, file in by_digest[digest].manifest.files.items():
            assert files.get(below + name) == file.sha256, f"{below}{name} is partial"
        assert files[below + "manifest.json"] == digest
    assert f"tiny/releases/{current}/manifest.json" in files
    return current


def test_after_a_cut_at_every_step_the_old_release_runs_and_the_next_push_finishes(machine, tmp_path):
    running = version(tmp_path, 0)
    put_in_place(machine, running)
    all_of_them, steps = [running], []
    for at in range(1, 100):
        wanted = version(tmp_path, at)
        all_of_them.append(wanted)
        try:
            done = put_in_place(machine, wanted, at)
        except EdgeoptError:
            done = None
        finished = done is not None and done.ended < at
        machine.power_cut()
        machine.boot()
        current = check(machine, all_of_them)
        assert current in ((wanted.digest,) if finished else (running.digest, wanted.digest)), f"after command {at}"
        steps.append({"commands": at, "runs": "new" if current == wanted.digest else "old"})
        put_in_place(machine, wanted)
        assert check(machine, all_of_them) == wanted.digest
        running = wanted
        if finished:  # this time every command was answered: there is no later moment
            break
    print(json.dumps(steps))
    assert steps[0]["runs"] == "old" and steps[-1]["runs"] == "new" and len(steps) > 4


def test_a_cut_while_bytes_move_leaves_no_partial_blob_and_is_resumed(machine, tmp_path):
    running, wanted = version(tmp_path, 1000), version(tmp_path, 1001)
    put_in_place(machine, running)
    with pytest.raises(EdgeoptError), Cutting(machine, None) as connection:
        push(wanted, connection, progress=CutWhile(machine, _BYTES // 2))
    assert machine.pid is None
    machine.boot()
    assert check(machine, [running, wanted]) == running.digest
    put_in_place(machine, wanted)
    assert check(machine, [running, wanted]) == wanted.digest
