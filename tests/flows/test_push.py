"""Push, over SSH to a real OpenSSH server and to this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt.errors import ArtifactError, DeviceError, LockedError, SpaceError, TransferError
from edgeopt.flows.place import locked
from edgeopt.flows.push import push
from edgeopt.ports.connect import connect
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import File, Selection
from tests.conftest import absent, wait_until
from tests.relay import Relay
from tests.tiny import tiny_artifact

BIG_BYTES = 8_000_000


@pytest.fixture
def artifact(tmp_path):
    return tiny_artifact(tmp_path / "built", torchscript=False)


@pytest.fixture
def big(tmp_path):
    """As `artifact`, with 8 MB of weights that do not compress."""
    return make_big(tmp_path / "built-big")


def make_big(folder: Path) -> Artifact:
    small = tiny_artifact(folder, torchscript=False)
    (small.folder / "weights.bin").write_bytes(os.urandom(BIG_BYTES))
    return with_file(small, "weights.bin")


def with_file(artifact: Artifact, name: str) -> Artifact:
    """The artifact with one more file, which lies in its folder."""
    from edgeopt import digest
    from edgeopt.spec import manifest as spec

    path = artifact.folder / name
    files = artifact.manifest.files | {name: File(sha256=digest.of_file(path), size=path.stat().st_size)}
    manifest = artifact.manifest.model_copy(update={"files": files})
    (artifact.folder / "manifest.json").write_bytes(spec.encode(manifest))
    return Artifact.open(artifact.folder)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_release_is_the_artifact_and_nothing_is_active(device, artifact, root):
    done = push(artifact, device, root=str(root))
    release = root / "tiny" / "releases" / artifact.digest
    assert done.release == str(release) and done.root == str(root)
    assert tree(release) == tree(artifact.folder)
    assert Artifact.open(release).digest == artifact.digest
    assert not (root / "tiny" / "current").exists()
    assert done.moved_bytes == sum(path.stat().st_size for path in artifact.folder.rglob("*") if path.is_file())
    assert sorted(os.listdir(root / "tiny" / "releases")) == [artifact.digest]


def test_the_same_again_moves_nothing(device, artifact, root):
    first = push(artifact, device, root=str(root))
    again = push(artifact, device, root=str(root))
    assert (first.already_there, again.already_there) == (False, True)
    assert (again.moved_bytes, again.blobs_moved, again.blobs_skipped) == (0, 0, first.blobs_moved)


def test_what_two_artifacts_share_lies_there_once(device, artifact, root, tmp_path):
    push(artifact, device, root=str(root))
    other = tiny_artifact(tmp_path / "other", torchscript=False, name="other")
    done = push(other, device, root=str(root))
    assert done.blobs_moved == 1  # the manifest
    name = "float.onnx"
    inodes = {
        os.stat(root / n / "releases" / d / name).st_ino
        for n, d in (("tiny", artifact.digest), ("other", other.digest))
    }
    assert len(inodes) == 1


def test_the_selection_goes_along_and_is_no_blob(device, artifact, root):
    plain = push(artifact, device, root=str(root / "plain"))
    assert not (Path(plain.release) / "selection.json").exists()
    artifact.write_selection(
        Selection(candidate="onnxruntime-fp32", decided_by="build", where="this machine", reason="r", verdict="only")
    )
    done = push(artifact, device, root=str(root))
    assert Artifact.open(done.release).selection() == artifact.selection()
    assert os.stat(Path(done.release) / "selection.json").st_nlink == 1


def test_without_a_root_releases_lie_in_the_devices_home(sshd, ssh_config, artifact):
    with connect("device", config=ssh_config(sshd)) as device:
        done = push(artifact, device)
    assert done.release.startswith(str(sshd.home / ".edgeopt" / "tiny" / "releases"))
    assert Artifact.open(done.release).digest == artifact.digest


def test_the_manifests_root_counts_where_none_is_given(device, tmp_path):
    artifact = tiny_artifact(tmp_path / "rooted", torchscript=False, root=str(tmp_path / "data"))
    assert push(artifact, device).root == str(tmp_path / "data")


def test_only_the_last_releases_stay_and_their_blobs(device, root, tmp_path):
    artifacts = [
        tiny_artifact(tmp_path / str(i), torchscript=False, metrics={"reference": {"accuracy": i / 10}})
        for i in range(4)
    ]
    for i, artifact in enumerate(artifacts):
        done = push(artifact, device, root=str(root), keep=2)
        release = root / "tiny" / "releases" / artifact.digest
        os.utime(release, (1000 + i, 1000 + i))
        for blob in (root / "blobs").rglob("*"):
            os.utime(blob, (1000, 1000))  # so old that nobody is about to link it
    assert sorted(os.listdir(root / "tiny" / "releases")) == sorted(a.digest for a in artifacts[2:])
    assert done.pruned == (artifacts[1].digest,)
    blobs = {p.name for p in (root / "blobs").rglob("*") if p.is_file()}
    assert {a.digest for a in artifacts[2:]} <= blobs and not blobs & {a.digest for a in artifacts[:2]}
    assert Artifact.open(root / "tiny" / "releases" / artifacts[2].digest)


def test_current_and_previous_are_never_pruned(device, root, tmp_path):
    from edgeopt.flows.activate import activate

    artifacts = [
        tiny_artifact(tmp_path / str(i), torchscript=False, metrics={"reference": {"accuracy": i / 10}})
        for i in range(4)
    ]
    for i, artifact in enumerate(artifacts):
        push(artifact, device, root=str(root), keep=1)
        os.utime(root / "tiny" / "releases" / artifact.digest, (1000 + i, 1000 + i))
        if i < 2:
            activate(device, "tiny", artifact.digest, root=str(root))
    assert sorted(os.listdir(root / "tiny" / "releases")) == sorted(artifacts[i].digest for i in (0, 1, 3))


def test_the_pushes_of_one_name_wait_for_nobody(device, artifact, root, tmp_path):
    with locked(connect(None), str(root), "tiny"):
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            push(artifact, device, root=str(root))
        other = tiny_artifact(tmp_path / "other", torchscript=False, name="other")
        push(other, device, root=str(root))
    push(artifact, device, root=str(root))


def test_a_folder_that_cannot_be_made_is_named(device, artifact, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        TransferError, match="cannot use the folder for releases.*(Not a directory|cannot create)"
    ) as refused:
        push(artifact, device, root=str(tmp_path / "file" / "root"))
    assert str(tmp_path / "file") in str(refused.value)


def test_a_device_without_what_the_scripts_call_is_refused(artifact, root, start_sshd, ssh_config, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("sh", "mkdir", "cat", "printf"):
        (programs / program).symlink_to(shutil.which(program))
    server = start_sshd("bare", f'SetEnv PATH="{programs}"')
    # a second SetEnv line does not count, so HOME stays the user's own here
    with connect("device", config=ssh_config(server)) as device, pytest.raises(DeviceError, match="lacks .*ln, ls, mv"):
        push(artifact, device, root=str(root))
    assert not root.exists()


def test_a_truncated_artifact_is_refused_before_anything_moves(artifact, root):
    with open(artifact.folder / "float.onnx", "r+b") as f:
        f.truncate(10)
    with pytest.raises(ArtifactError, match="10 bytes instead of"):
        push(Artifact.open(artifact.folder), connect(None), root=str(root))
    assert not root.exists()


def test_a_file_that_changes_after_it_was_opened_never_becomes_a_release(device, big, root):
    with open(big.folder / "weights.bin", "r+b") as f:
        f.write(b"changed")
    with pytest.raises(ArtifactError, match="changed while it was pushed") as refused:
        push(big, device, root=str(root))
    assert "weights.bin" in str(refused.value)
    assert os.listdir(root / "tiny" / "releases") == [] and not list(root.rglob("*.part"))


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int):
    """A tmpfs of `size_bytes` at `folder`; needs root."""
    if os.geteuid() != 0:
        absent("mounting a small tmpfs needs root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        absent(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_told_of_before_anything_moves(device, big, tmp_path):  # S01
    with small_disk(tmp_path / "disk", 3 << 20) as disk:
        with pytest.raises(SpaceError, match=r"8\.\d MB are needed, 3\.1 MB are free") as refused:
            push(big, device, root=str(disk))
        assert str(disk) in str(refused.value)
        assert not list(disk.rglob("*.part")) and not [p for p in (disk / "blobs").rglob("*") if p.is_file()]


def test_a_disk_that_fills_up_meanwhile_keeps_no_half_file(device, big, tmp_path):  # S01
    from edgeopt.ports.blobs import BlobStore

    with small_disk(tmp_path / "disk", 3 << 20) as disk:
        sha256 = big.manifest.files["weights.bin"].sha256
        with pytest.raises(SpaceError, match="disk is full") as refused:
            BlobStore(device, str(disk), owner="tiny").upload(big.path("weights.bin"), sha256, BIG_BYTES, None)
        assert sha256 in str(refused.value)
        with pytest.raises(SpaceError, match="disk is full"):
            device.put(big.path("weights.bin"), str(disk / "file"))
        assert [p for p in disk.rglob("*") if p.is_file()] == []


# over a relay: what travels is counted, cut and silenced


def through(relay, sshd, ssh_config):
    return connect("device", config=ssh_config(sshd, Port=relay.port))


def test_an_unchanged_push_moves_less_than_20_kb_handshake_included(sshd, ssh_config, big, root):
    with Relay(sshd.port) as relay:
        with through(relay, sshd, ssh_config) as device:
            push(big, device, root=str(root))
        assert relay.total > BIG_BYTES
        relay.reset()
        with through(relay, sshd, ssh_config) as device:
            assert push(big, device, root=str(root)).already_there
        assert 0 < relay.total < 20_000


def test_a_push_that_was_cut_goes_on_where_it_was(sshd, ssh_config, big, root):  # S03
    with Relay(sshd.port, cut_after=5_000_000) as relay:
        with through(relay, sshd, ssh_config) as device, pytest.raises(TransferError, match="broke|cut short"):
            push(big, device, root=str(root))
        assert os.listdir(root / "tiny" / "releases") == []
        sha256 = big.manifest.files["weights.bin"].sha256
        blob = root / "blobs" / "sha256" / sha256[:2] / sha256
        part = blob.with_name(f"{sha256}.tiny.part")
        assert not blob.exists()
        with through(relay, sshd, ssh_config) as device:
            wait_for_lock(device, root)  # what the cut left behind has ended
            arrived = part.stat().st_size
            assert arrived > 1_000_000
            relay.reset()
            done = push(big, device, root=str(root))
        left = BIG_BYTES - arrived
        assert left <= done.moved_bytes < left + 100_000 and relay.to_server < left + 150_000
    assert Artifact.open(done.release).digest == big.digest


def test_what_is_no_beginning_of_the_file_is_not_built_upon(device, big, root):
    sha256 = big.manifest.files["weights.bin"].sha256
    part = root / "blobs" / "sha256" / sha256[:2] / f"{sha256}.tiny.part"
    part.parent.mkdir(parents=True)
    for left in (b"something else" * 1000, big.path("weights.bin").read_bytes() + b"too long"):
        part.write_bytes(left)
        done = push(big, device, root=str(root))
        assert Artifact.open(done.release).digest == big.digest and not part.exists()
        shutil.rmtree(done.release)
        os.unlink(part.with_name(sha256))


def test_a_blob_that_was_truncated_by_a_power_cut_is_sent_again(device, big, root):
    sha256 = big.manifest.files["weights.bin"].sha256
    blob = root / "blobs" / "sha256" / sha256[:2] / sha256
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"")
    assert Artifact.open(push(big, device, root=str(root)).release).digest == big.digest


def test_a_pusher_that_is_killed_leaves_nothing_half_made(sshd, ssh_config, big, root):
    with Relay(sshd.port, silent_after=3_000_000) as relay:
        config = ssh_config(sshd, Port=relay.port)
        argv = [sys.executable, "-m", "edgeopt", "push", big.folder, "device", "--root", root, "--ssh-config", config]
        pusher = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert wait_until(lambda: relay.to_server >= 3_000_000, within_s=20)
        os.kill(pusher.pid, signal.SIGKILL)
        assert pusher.wait() == -signal.SIGKILL
    assert os.listdir(root / "tiny" / "releases") == []
    with connect("device", config=ssh_config(sshd)) as device:
        wait_for_lock(device, root)
        done = push(big, device, root=str(root))
    assert Artifact.open(done.release).digest == big.digest
    assert done.moved_bytes < BIG_BYTES
    assert not list(root.rglob("*.part")) and os.listdir(root / "tiny" / "releases") == [big.digest]


def wait_for_lock(device, root):
    """Wait until the device has noticed that the pusher before is gone."""

    def attempt() -> bool:
        try:
            with locked(device, str(root), "tiny"):
                return True
        except LockedError:
            return False

    assert wait_until(attempt)


def test_a_file_system_without_hard_links_gets_copies(artifact, root, tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ln").write_text("#!/bin/sh\nexit 1\n")
    (programs / "ln").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    done = push(artifact, connect(None), root=str(root))
    assert Artifact.open(done.release).digest == artifact.digest
    assert os.stat(Path(done.release) / "float.onnx").st_nlink == 1
