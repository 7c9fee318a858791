"""A device that demands signatures: policy and verifier of root, pushes by an ordinary user over a real sshd."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from edgeopt.errors import ArtifactError, DeviceError
from edgeopt.flows import policy
from edgeopt.flows.activate import activate, rollback
from edgeopt.flows.push import push
from edgeopt.flows.sign import sign
from edgeopt.flows.status import status
from edgeopt.ports.connect import connect
from edgeopt.progress import log
from edgeopt.runtime.artifact import Artifact
from tests.conftest import SCRIPTS, absent
from tests.flows.test_sign import make_key
from tests.ordinary_user import ordinary_user
from tests.tiny import tiny_artifact

ROOT = "/mnt/home/releases"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return {name: make_key(folder / name) for name in ("alice", "bob")}


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory):
    """Three artifacts of one name."""
    folders = [tmp_path_factory.mktemp("made") for _ in range(3)]
    return [tiny_artifact(f, torchscript=False, extra={"w.bin": bytes([i])}) for i, f in enumerate(folders)]


@pytest.fixture
def artifacts(unsigned, tmp_path):
    return [Artifact.open(shutil.copytree(a.folder, tmp_path / str(i) / "a")) for i, a in enumerate(unsigned)]


@pytest.fixture
def device(tmp_path):
    with ordinary_user(tmp_path / "device") as found:
        yield found


@pytest.fixture
def connection(device, ssh_config):
    with connect("device@device", config=ssh_config(device)) as opened:
        yield opened


@pytest.fixture
def install(tmp_path, keys, device, monkeypatch):
    """install(*options): the policy, as root runs it on the device, below the prefix /mnt/system."""
    (tmp_path / "allowed").write_text("alice@lab " + keys["alice"].with_suffix(".pub").read_text())
    monkeypatch.setattr(policy, "FOLDER", "/mnt/system/etc/edgeopt")

    def run(*options) -> str:
        argv = [SCRIPTS / "install-device-policy", "--allowed-signers", tmp_path / "allowed", "--prefix", "/mnt/system"]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" /mnt && shift && exec "$@"', "sh",
             device.mounted, *argv, *options], capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def on_device(device, *argv) -> subprocess.CompletedProcess:
    """A command of root on the device."""
    mounted = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" /mnt && shift && exec "$@"', "sh", device.mounted]
    return subprocess.run([str(a) for a in [*mounted, *argv]], capture_output=True, text=True)


VERIFIER = "/mnt/system/usr/local/bin/edgeopt-verify"


def moved(device) -> bool:
    """Whether anything of an artifact lies on the device."""
    root = device.mounted / "home" / "releases"
    return any(path.is_file() for part in ("blobs", "tiny/releases") for path in (root / part).rglob("*"))


def test_without_a_policy_nothing_is_demanded(connection, artifacts):
    assert policy.read(connection) is None
    push(artifacts[0], connection, root=ROOT)
    activate(connection, "tiny", root=ROOT)


def test_an_unsigned_artifact_is_refused_before_anything_moves(device, connection, install, artifacts, keys, tmp_path):
    assert "installed" in install()
    with pytest.raises(ArtifactError, match="signed artifacts only"):
        push(artifacts[0], connection, root=ROOT)
    sign(artifacts[0], keys["bob"])
    with pytest.raises(ArtifactError, match="SHA256:.* may sign for this device"):
        push(artifacts[0], connection, root=ROOT)
    sign(artifacts[0], keys["alice"])
    shutil.copy(artifacts[0].folder / "manifest.sig", artifacts[1].folder)
    shutil.copy(artifacts[0].folder / "manifest.signed", artifacts[1].folder)
    with pytest.raises(ArtifactError, match="another artifact"):
        push(artifacts[1], connection, root=ROOT)
    assert not moved(device)
    push(artifacts[0], connection, root=ROOT)
    assert moved(device) and activate(connection, "tiny", root=ROOT).digest == artifacts[0].digest


def test_the_user_can_change_nothing_of_it(device, connection, install):
    install("--minimum", "tiny=3")
    for path in (
        "etc/edgeopt/policy", "etc/edgeopt/allowed_signers", "etc/edgeopt/revoked", "etc/edgeopt/minimum",
        "usr/local/bin/edgeopt-verify", "etc/edgeopt/x", "var/lib/edgeopt/versions/tiny", "usr/local/bin/x",
    ):  # fmt: skip
        assert connection.run(["sh", "-c", f"echo x >> /mnt/system/{path}"], check=False).status != 0, path
    for path in ("etc/edgeopt", "etc", "usr/local/bin/edgeopt-verify", "var/lib/edgeopt"):
        assert connection.run(["mv", f"/mnt/system/{path}", "/mnt/home/x"], check=False).status != 0, path
    for path in (device.mounted / "system").rglob("*"):
        assert path.stat().st_uid == 0 and not path.stat().st_mode & 0o022, path
    assert connection.run(["cat", "/mnt/system/etc/edgeopt/minimum"]).text == "tiny 3"


def test_a_release_that_was_changed_after_the_push_is_not_activated(device, connection, install, artifacts, keys):
    install()
    sign(artifacts[0], keys["alice"])
    push(artifacts[0], connection, root=ROOT)
    release = device.mounted / "home" / "releases" / "tiny" / "releases" / artifacts[0].digest
    path, data = release / "float.onnx", (release / "float.onnx").read_bytes()

    def refused(match):
        with pytest.raises(ArtifactError, match=match):
            activate(connection, "tiny", root=ROOT)
        assert not (release.parents[1] / "current").exists()

    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused("float.onnx is not as it was signed")
    path.unlink()
    refused("float.onnx is not as it was signed")
    path.symlink_to("/etc/passwd")
    refused("neither a plain file nor a folder")
    path.unlink()
    path.write_bytes(data)
    (release / "json.py").write_text("")  # `health` runs there, and Python would take it
    refused("json.py is not part of what was signed")
    (release / "json.py").unlink()
    odd = release / "float.onnx\n." / "float.onnx"  # which a list of names shows as two that are signed
    odd.parent.mkdir()
    odd.write_text("")
    refused("neither a plain file nor a folder")
    shutil.rmtree(odd.parent)
    (release / "selection.json").write_text("{}")  # outside of the signature by design
    assert activate(connection, "tiny", root=ROOT).changed


def test_a_signature_arrives_at_a_release_that_was_there_before(connection, install, artifacts, keys):
    push(artifacts[0], connection, root=ROOT)
    install()
    sign(artifacts[0], keys["alice"], version=5)
    with pytest.raises(ArtifactError, match="it is not signed"):
        activate(connection, "tiny", root=ROOT)
    for version in (5, 6):
        sign(artifacts[0], keys["alice"], version=version)
        assert push(artifacts[0], connection, root=ROOT).moved_bytes == 0
        said = connection.run(["cat", f"{ROOT}/tiny/releases/{artifacts[0].digest}/manifest.signed"]).text
        assert f"\nversion {version}\n" in said
    assert activate(connection, "tiny", root=ROOT).changed


def test_at_every_step_of_replacing_a_signature_the_release_is_accepted(device, connection, install, artifacts, keys):
    """As after a power cut between any two of the renames of _CARRY."""
    install()
    sign(artifacts[0], keys["alice"], version=5)
    release = push(artifacts[0], connection, root=ROOT).release
    folder = device.mounted / "home" / "releases" / "tiny" / "releases" / artifacts[0].digest
    sign(artifacts[0], keys["alice"], version=6)
    new = {name: (artifacts[0].folder / name).read_bytes() for name in ("manifest.sig", "manifest.signed")}
    steps = [
        lambda: (folder / "manifest.sig.new").write_bytes(new["manifest.sig"][:50]),
        lambda: (folder / "manifest.sig.new").write_bytes(new["manifest.sig"]),
        lambda: (folder / "manifest.signed.new").write_bytes(new["manifest.signed"]),
        lambda: os.replace(folder / "manifest.signed.new", folder / "manifest.signed"),
        lambda: os.replace(folder / "manifest.sig.new", folder / "manifest.sig"),
    ]
    for step in steps:
        step()
        done = connection.run([VERIFIER, release], check=False)
        assert done.status == 0, done.complaint


def test_an_older_version_is_refused_unless_the_policy_allows_it(connection, install, artifacts, keys):
    install()
    for artifact, version in zip(artifacts, (10, 11, 9), strict=True):
        sign(artifact, keys["alice"], version=version)
        push(artifact, connection, root=ROOT)
    activate(connection, "tiny", artifacts[0].digest, root=ROOT)
    activate(connection, "tiny", artifacts[1].digest, root=ROOT)
    with pytest.raises(ArtifactError, match="version 9 of tiny is older than 11, which is current"):
        activate(connection, "tiny", artifacts[2].digest, root=ROOT)
    with pytest.raises(ArtifactError, match="version 10 of tiny is older than 11"):
        rollback(connection, "tiny", root=ROOT)
    sign(artifacts[0], keys["alice"], version=12)  # the old artifact, vouched for anew
    push(artifacts[0], connection, root=ROOT)
    assert rollback(connection, "tiny", root=ROOT).digest == artifacts[0].digest
    install("--downgrade", "allow")
    assert activate(connection, "tiny", artifacts[2].digest, root=ROOT).digest == artifacts[2].digest


def test_a_recorded_version_and_the_policys_minimum_hold_whatever_the_user_removes(
    device, connection, install, artifacts, keys
):
    install("--minimum", "tiny=8")
    for artifact, version in zip(artifacts, (7, 10, 9), strict=True):
        sign(artifact, keys["alice"], version=version)
    with pytest.raises(ArtifactError, match="version 7 of tiny is below 8, the policy's minimum"):
        push(artifacts[0], connection, root=ROOT)
    release = push(artifacts[1], connection, root=ROOT).release
    push(artifacts[2], connection, root=ROOT)
    assert connection.run([VERIFIER, "--record", release], check=False).status == 69  # he is not root
    assert on_device(device, VERIFIER, "--record", release).returncode == 0
    connection.run(["rm", "-rf", release, f"{ROOT}/tiny/current"])
    with pytest.raises(ArtifactError, match="version 9 of tiny is older than 10, which ran here"):
        activate(connection, "tiny", artifacts[2].digest, root=ROOT)
    install()  # a new policy keeps what was recorded
    with pytest.raises(ArtifactError, match="older than 10"):
        push(artifacts[2], connection, root=ROOT)


def test_a_failed_health_returns_to_the_old_version_all_the_same(connection, install, unsigned, keys, tmp_path):
    install()
    good = tiny_artifact(tmp_path / "good", torchscript=False, health=("true",))
    bad = tiny_artifact(tmp_path / "bad", torchscript=False, health=("false",))
    for version, artifact in enumerate((good, bad), 1):
        sign(artifact, keys["alice"], version=version)
        push(artifact, connection, root=ROOT)
    activate(connection, "tiny", good.digest, root=ROOT)
    with pytest.raises(DeviceError, match="switched back"):
        activate(connection, "tiny", bad.digest, root=ROOT)
    target = connection.run(["readlink", f"{ROOT}/tiny/current"]).text
    assert target.endswith(good.digest)
    assert connection.run([VERIFIER, f"{ROOT}/tiny/current"]).status == 0  # what the application's start asks


def test_a_revoked_key_and_an_identity(connection, install, artifacts, keys, tmp_path):
    revoked = tmp_path / "revoked"
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", revoked, keys["alice"].with_suffix(".pub")], check=True)
    sign(artifacts[0], keys["alice"])
    install("--revoked", revoked)
    with pytest.raises(ArtifactError, match="is revoked"):
        push(artifacts[0], connection, root=ROOT)
    install("--identity", "carol@lab")
    with pytest.raises(ArtifactError, match="may sign"):
        push(artifacts[0], connection, root=ROOT)
    install("--identity", "carol@lab", "--identity", "alice@lab")
    push(artifacts[0], connection, root=ROOT)


def test_an_application_runs_what_was_verified_and_not_what_came_after(device, connection, install, artifacts, keys):
    """`ExecStartPre=+edgeopt-verify --copy`: the user may change his release at any time, and not what runs."""
    install()
    sign(artifacts[0], keys["alice"])
    push(artifacts[0], connection, root=ROOT)
    activate(connection, "tiny", root=ROOT)
    run = "/mnt/system/run/tiny"
    start = [VERIFIER, "--copy", f"{ROOT}/tiny/current", run]
    assert on_device(device, *start).returncode == 0
    copied = device.mounted / "system" / "run" / "tiny"
    (release,) = {p.resolve() for p in (copied / os.readlink(copied / "current")).parents if p.name == "tiny"}
    assert Artifact.open(copied / os.readlink(copied / "current")).digest == artifacts[0].digest
    assert sorted(os.listdir(release)) == sorted([artifacts[0].digest, "current"])
    assert connection.run(["sh", "-c", f"echo x > {run}/current/float.onnx"], check=False).status != 0
    before = (copied / artifacts[0].digest).stat().st_ino
    assert on_device(device, *start).returncode == 0  # again, as at every start: nothing is copied
    assert (copied / artifacts[0].digest).stat().st_ino == before
    current = device.mounted / "home" / "releases" / "tiny" / "releases" / artifacts[0].digest
    weights = current / "float.onnx"
    for harm in ("link", "pipe", "endless", "large", "changed"):
        shutil.rmtree(copied)
        weights.unlink()
        if harm == "link":
            weights.symlink_to("/etc/shadow")
        elif harm == "pipe":
            os.mkfifo(weights)
        elif harm == "endless":
            weights.symlink_to("/dev/zero")
        else:
            weights.write_bytes(b"x" * (10_000_000 if harm == "large" else 100))
        done = on_device(device, *start)
        assert done.returncode == 1 and "refused" in done.stderr, (harm, done)
        assert not any(copied.iterdir()), harm
        copied.mkdir(exist_ok=True)
    assert connection.run([VERIFIER, "--copy", f"{ROOT}/tiny/current", "/mnt/home/x"], check=False).status == 2


def test_a_device_whose_ssh_keygen_is_too_old_leaves_it_to_the_host(
    device, connection, install, artifacts, keys, caplog
):
    old = device.mounted / "system" / "old-ssh-keygen"
    old.write_text("#!/bin/sh\necho 'unknown option -- Y' >&2\nexit 1\n")  # what OpenSSH 7.6 of JetPack 4 answers
    old.chmod(0o755)
    assert "cannot verify" in install("--ssh-keygen", "/mnt/system/old-ssh-keygen")
    found = policy.read(connection)
    assert not found.device_verifies and "older than 8.1" in str(found)
    log.addHandler(caplog.handler)
    try:
        sign(artifacts[0], keys["bob"])
        with pytest.raises(ArtifactError, match="nobody who may sign"):
            push(artifacts[0], connection, root=ROOT)
        assert "this machine does" in caplog.text
        sign(artifacts[0], keys["alice"], version=4)
        push(artifacts[0], connection, root=ROOT)
        activate(connection, "tiny", root=ROOT)
        sign(artifacts[1], keys["alice"], version=3)
        push(artifacts[1], connection, root=ROOT)
        with pytest.raises(ArtifactError, match="older than 4"):
            activate(connection, "tiny", artifacts[1].digest, root=ROOT)
    finally:
        log.removeHandler(caplog.handler)


def test_a_policy_that_cannot_be_read_stops_a_push(device, connection, install, artifacts):
    install()
    path = device.mounted / "system" / "etc" / "edgeopt" / "policy"
    path.chmod(0o600)
    with pytest.raises(DeviceError, match="cannot be read: .*ermission denied"):
        push(artifacts[0], connection, root=ROOT)
    path.chmod(0o644)
    path.write_text("edgeopt-policy 99\n")
    with pytest.raises(DeviceError, match="does not know"):
        push(artifacts[0], connection, root=ROOT)
    assert not moved(device)


def test_status_says_what_the_device_demands_and_which_versions_it_has(connection, install, artifacts, keys):
    push(artifacts[1], connection, root=ROOT)
    found = status(connection, root=ROOT)
    assert found.policy is None and [(r.signed, r.version) for r in found.names[0].releases] == [(False, None)]
    install("--identity", "alice@lab")
    sign(artifacts[0], keys["alice"], version=12)
    push(artifacts[0], connection, root=ROOT)
    found = status(connection, root=ROOT)
    assert found.policy == "demands artifacts signed by alice@lab"
    assert {(r.signed, r.version) for r in found.names[0].releases} == {(True, 12), (False, None)}


def test_the_verifier_needs_no_more_than_busybox_and_ssh_keygen(device, connection, install, artifacts, keys, tmp_path):
    busybox = shutil.which("busybox")
    if busybox is None:
        absent("busybox is not installed")
    install()
    sign(artifacts[0], keys["alice"], version=5)
    release = push(artifacts[0], connection, root=ROOT).release
    programs = device.mounted / "system" / "busybox"
    programs.mkdir()
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True).stdout.split():
        (programs / name).symlink_to(busybox)
    (programs / "ssh-keygen").symlink_to(shutil.which("ssh-keygen"))
    text = (device.mounted / "system" / "usr" / "local" / "bin" / "edgeopt-verify").read_text()
    assert "\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\n" in text
    small = device.mounted / "system" / "small-verify"
    small.write_text(text.replace("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "PATH=/mnt/system/busybox"))

    def verify(*argv):
        return on_device(device, "/mnt/system/busybox/sh", "/mnt/system/small-verify", *argv)

    assert (verify(release).returncode, verify("--record", release).returncode) == (0, 0)
    assert verify("--copy", release, "/mnt/system/run").returncode == 0
    assert Artifact.open(device.mounted / "system" / "run" / "current").digest == artifacts[0].digest
    folder = device.mounted / "home" / "releases" / "tiny" / "releases" / artifacts[0].digest
    (folder / "evil.py").write_text("")
    assert "evil.py is not part of what was signed" in verify(release).stderr
    (folder / "evil.py").unlink()
    (folder / "float.onnx").unlink()
    (folder / "float.onnx").write_bytes(b"evil")
    assert "float.onnx is not as it was signed" in verify(release).stderr
