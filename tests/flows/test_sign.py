"""Signatures by the real ssh-keygen: what they cover, who may make them, and what each refusal says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt.errors import ArtifactError, UsageError
from edgeopt.flows.pack import pack, unpack
from edgeopt.flows.sign import sign, verify
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec import statement
from tests.tiny import tiny_artifact

PASSPHRASE = "correct horse battery staple"


def make_key(path: Path, *, passphrase: str = "", kind: str = "ed25519") -> Path:
    # the passphrase in argv is this test's, of a key that protects nothing
    argv = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", path]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return path


def allow(folder: Path, **keys: Path) -> Path:
    """allowed_signers in `folder`: identity -> private key."""
    lines = [f"{name}@lab {key.with_suffix('.pub').read_text()}" for name, key in keys.items()]
    (folder / "allowed_signers").write_text("".join(lines))
    return folder / "allowed_signers"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return {name: make_key(folder / name) for name in ("alice", "bob", "eve")}


@pytest.fixture(scope="module")
def made(tmp_path_factory, keys):
    artifact = tiny_artifact(tmp_path_factory.mktemp("made"), torchscript=False)
    sign(artifact, keys["alice"], version=7)
    return artifact


@pytest.fixture
def artifact(made, tmp_path):
    return Artifact.open(shutil.copytree(made.folder, tmp_path / "tiny.edgeopt"))


@pytest.fixture
def allowed(tmp_path, keys):
    return allow(tmp_path, alice=keys["alice"], bob=keys["bob"])


def fingerprint(key: Path) -> str:
    return subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True).stdout.split()[1]


def test_a_signature_says_who_signed_which_version(artifact, allowed, keys):
    done = verify(artifact, allowed)
    assert (done.identity, done.version, done.digest) == ("alice@lab", 7, artifact.digest)
    assert done.fingerprint == fingerprint(keys["alice"])
    assert verify(artifact, allowed, identity="alice@lab").identity == "alice@lab"


def test_the_signature_is_openssh_own(artifact, allowed):
    """What is documented for a device without edgeopt, by hand."""
    argv = ["ssh-keygen", "-Y", "verify", "-f", allowed, "-I", "alice@lab", "-n", "edgeopt-artifact", "-s"]
    with open(artifact.folder / "manifest.signed", "rb") as text:
        assert (
            subprocess.run([*argv, artifact.folder / "manifest.sig"], stdin=text, capture_output=True).returncode == 0
        )
    lines = (artifact.folder / "manifest.signed").read_text().splitlines(keepends=True)
    done = subprocess.run(
        ["sha256sum", "-c"], cwd=artifact.folder, input="".join(lines[5:]), text=True, capture_output=True
    )
    assert done.returncode == 0 and done.stdout.count(": OK") == len(artifact.manifest.files) + 1


def test_one_changed_byte_anywhere_is_found(artifact, allowed):
    """Every file of the folder, the manifest and the signature included, at its first, middle and last byte."""
    paths = sorted(path for path in artifact.folder.rglob("*") if path.is_file())
    assert len(paths) == len(artifact.manifest.files) + 3
    for path in paths:
        data = path.read_bytes()
        for at in {0, len(data) // 2, len(data) - 2}:  # the last byte of the signature's file is a newline
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(ArtifactError):
                verify(Artifact.open(artifact.folder), allowed)
        path.write_bytes(data)
    assert verify(Artifact.open(artifact.folder), allowed).version == 7


@pytest.mark.parametrize("where", ["name", "version", "signed", "bytes", "./float.onnx", "./manifest.json"])
def test_every_line_of_the_statement_is_covered(artifact, allowed, where):
    path = artifact.folder / "manifest.signed"
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if where in line.split())
    lines[at] = lines[at].replace("1", "2") if "1" in lines[at] else lines[at].replace("7", "8").replace("tiny", "tinx")
    path.write_text("".join(lines))
    with pytest.raises(ArtifactError):
        verify(artifact, allowed)


def test_what_is_not_covered_is_named(artifact, allowed):
    (artifact.folder / "selection.json").write_text("{}")
    (artifact.folder / "build.json").write_text("{}")
    (artifact.folder / "extra.py").write_text("")
    assert verify(artifact, allowed).not_covered == ("build.json", "extra.py", "selection.json")


def test_a_stranger_a_revoked_key_another_identity_and_no_signature_are_told_apart(artifact, allowed, keys, tmp_path):
    with pytest.raises(ArtifactError, match="may sign as bob"):
        verify(artifact, allowed, identity="bob@lab")
    revoked = tmp_path / "revoked"
    for argv in (["cp", keys["alice"].with_suffix(".pub"), revoked],
                 ["ssh-keygen", "-q", "-k", "-f", revoked, keys["alice"].with_suffix(".pub")]):  # fmt: skip
        subprocess.run(argv, check=True)  # both forms that ssh-keygen(1) names: public keys, and a KRL
        with pytest.raises(ArtifactError, match=f"{fingerprint(keys['alice'])} is revoked".replace("+", "[+]")):
            verify(artifact, allowed, revoked=revoked)
    sign(artifact, keys["bob"])
    assert verify(artifact, allowed, revoked=revoked).identity == "bob@lab"
    sign(artifact, keys["eve"])
    with pytest.raises(ArtifactError, match="nobody who may sign"):
        verify(artifact, allowed)
    (artifact.folder / "manifest.sig").unlink()
    with pytest.raises(ArtifactError, match="not signed"):
        verify(artifact, allowed)


def test_a_signature_for_another_purpose_is_none(artifact, allowed, keys):
    """The same key signs commits and mails: only what was signed as an artifact counts."""
    argv = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", keys["alice"], artifact.folder / "manifest.signed"]
    subprocess.run(argv, check=True)
    os.replace(artifact.folder / "manifest.signed.sig", artifact.folder / "manifest.sig")
    with pytest.raises(ArtifactError, match="namespace"):
        verify(artifact, allowed)


def test_options_of_allowed_signers_are_honoured(artifact, keys, tmp_path):
    public = keys["alice"].with_suffix(".pub").read_text()
    for options, good in (
        ('namespaces="edgeopt-artifact"', True), ('namespaces="git"', False), ('valid-before="20200101"', False),
        ('valid-after="20200101"', True),
    ):  # fmt: skip
        (tmp_path / "allowed").write_text(f"alice@lab {options} {public}")
        if good:
            assert verify(artifact, tmp_path / "allowed").identity == "alice@lab"
        else:
            with pytest.raises(ArtifactError, match="may sign"):
                verify(artifact, tmp_path / "allowed")


def test_one_signature_is_not_one_of_another_artifact(made, artifact, allowed, keys, tmp_path):
    other = tiny_artifact(tmp_path / "other", torchscript=False, name="other")
    for name in ("manifest.signed", "manifest.sig"):
        shutil.copy(artifact.folder / name, other.folder / name)
    with pytest.raises(ArtifactError, match="another artifact"):
        verify(other, allowed)


def test_versions_count_up_by_themselves(artifact, keys):
    first = sign(artifact, keys["alice"])
    assert len(str(first.version)) == 14
    assert sign(artifact, keys["alice"]).version > first.version
    sign(artifact, keys["alice"], version=statement.MAX_VERSION - 1)
    assert sign(artifact, keys["alice"]).version == statement.MAX_VERSION
    for version in (0, -1, statement.MAX_VERSION + 1):
        with pytest.raises(UsageError, match="version"):
            sign(artifact, keys["alice"], version=version)


def test_a_packed_artifact_keeps_its_signature(artifact, allowed, tmp_path):
    assert pack(artifact, tmp_path / "x.tar").signed
    unpack(tmp_path / "x.tar", tmp_path / "back")
    assert verify(Artifact.open(tmp_path / "back"), allowed).version == 7


def test_a_key_that_is_missing_or_locked_is_said_and_nothing_changes(artifact, allowed, tmp_path):
    with pytest.raises(UsageError, match="no such key"):
        sign(artifact, tmp_path / "nokey")
    locked = make_key(tmp_path / "locked", passphrase=PASSPHRASE)
    # in a session without a terminal, where ssh-keygen cannot ask
    argv = [sys.executable, "-m", "edgeopt", "artifact", "sign", artifact.folder, "--key", locked]
    env = {k: v for k, v in os.environ.items() if k not in ("SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY")}
    done = subprocess.run(
        argv, start_new_session=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env
    )
    assert done.returncode == 2 and "did not sign" in done.stderr and "ssh-add" in done.stderr
    assert verify(artifact, allowed).version == 7


@pytest.mark.parametrize(("program", "match"), [("no-such-ssh-keygen", "not installed"), ("old", "too old")])
def test_an_ssh_keygen_that_cannot_is_named(artifact, allowed, keys, tmp_path, program, match):
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 'unknown option -- Y' >&2\nexit 1\n")  # what OpenSSH 7.6 answers
    old.chmod(0o755)
    program = str(old) if program == "old" else program
    for call in (lambda: verify(artifact, allowed, program=program),
                 lambda: sign(artifact, keys["bob"], program=program)):  # fmt: skip
        with pytest.raises(ArtifactError, match=match):
            call()


def test_a_signature_that_is_a_link_or_huge_is_refused(artifact, allowed):
    path = artifact.folder / "manifest.sig"
    data = path.read_bytes()
    path.write_bytes(data + b"x" * (1 << 16))
    with pytest.raises(ArtifactError, match="absurdly large"):
        verify(artifact, allowed)
    path.unlink()
    (artifact.folder.parent / "sig").write_bytes(data)
    path.symlink_to(artifact.folder.parent / "sig")
    with pytest.raises(ArtifactError, match="not signed"):
        verify(artifact, allowed)


def test_the_commands(artifact, allowed, keys, tmp_path):
    def edgeopt(*argv):
        done = subprocess.run([sys.executable, "-m", "edgeopt", "artifact", *argv], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, _ = edgeopt("sign", artifact.folder, "--key", keys["bob"], "--version", "9", "--json")
    assert code == 0 and json.loads(out)["version"] == 9
    code, out, _ = edgeopt("verify", artifact.folder, "--allowed-signers", allowed)
    assert code == 0 and "version 9" in out and "bob@lab" in out
    code, out, _ = edgeopt("pack", artifact.folder, tmp_path)
    assert code == 0 and f"{tmp_path}/tiny.edgeopt.tar" in out and "with its signature" in out
    code, out, _ = edgeopt("unpack", tmp_path / "tiny.edgeopt.tar", tmp_path / "back", "--json")
    assert code == 0 and json.loads(out)["digest"] == artifact.digest
    code, _, err = edgeopt("verify", tmp_path / "back", "--allowed-signers", allowed, "--identity", "alice@lab")
    assert code == 10 and "may sign as alice@lab" in err
