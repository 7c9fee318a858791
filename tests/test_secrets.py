"""Nothing secret is written or shown: passphrases and private keys, over signing, packing, pushing and status."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt.flows.sign import verify
from edgeopt.ports.connect import connect
from edgeopt.runtime.artifact import Artifact
from tests.conftest import wait_until
from tests.flows.test_sign import PASSPHRASE, allow, make_key
from tests.tiny import tiny_artifact


@pytest.fixture
def agent(tmp_path):
    """The environment with an ssh-agent of this test."""
    sock = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL) as child:
        try:
            assert wait_until(sock.exists)
            yield {**os.environ, "SSH_AUTH_SOCK": str(sock)}
        finally:
            child.terminate()


@pytest.fixture
def secret(tmp_path):
    """A folder with a key under PASSPHRASE, and a program that types it where ssh-keygen asks."""
    folder = tmp_path / "secret"
    folder.mkdir()
    make_key(folder / "key", passphrase=PASSPHRASE)
    (folder / "askpass").write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
    (folder / "askpass").chmod(0o700)
    return folder


@pytest.fixture
def written(tmp_path):
    """What the commands write: their output, and the arguments of every ssh-keygen, which the real one answers."""
    folder = tmp_path / "written"
    folder.mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ssh-keygen"
    program.write_text(
        f'#!/bin/sh\ntr "\\0" " " < /proc/$$/cmdline >> "{folder}/argv"\nexec {shutil.which("ssh-keygen")} "$@"\n'
    )
    program.chmod(0o755)
    return folder


def edgeopt(written: Path, env: dict, *argv) -> subprocess.CompletedProcess:
    env = {**env, "PATH": f"{written.parent / 'bin'}:{env['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "edgeopt", "--verbose", *argv], env=env, start_new_session=True,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    with open(written / "output", "a") as f:
        f.write(done.stdout + done.stderr)
    return done


def found_in(folder: Path, key: Path) -> list[str]:
    """The files below `folder` that hold the passphrase, or 40 characters of the private key."""
    body = "".join(line for line in key.read_text().splitlines() if "PRIVATE KEY" not in line)
    needles = [PASSPHRASE.encode(), b"PRIVATE KEY", *(body[i : i + 40].encode() for i in range(0, len(body) - 40, 20))]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(needle in path.read_bytes() for needle in needles)]


def test_no_secret_is_written_anywhere(tmp_path, sshd, ssh_config, secret, written, agent):
    key = secret / "key"
    artifact = tiny_artifact(tmp_path / "made", torchscript=False)
    asked = {**agent, "SSH_ASKPASS": str(secret / "askpass"), "SSH_ASKPASS_REQUIRE": "force"}
    done = edgeopt(written, asked, "artifact", "sign", artifact.folder, "--key", key, "--version", "1")
    assert done.returncode == 0, done.stderr  # the passphrase came from askpass
    subprocess.run(["ssh-add", "-q", key], env=asked, check=True, stdin=subprocess.DEVNULL)
    public = shutil.copy(key.with_suffix(".pub"), tmp_path / "public.pub")
    done = edgeopt(written, agent, "artifact", "sign", artifact.folder, "--key", public, "--version", "2")
    assert done.returncode == 0, done.stderr  # the key never left the agent
    allowed = allow(tmp_path, alice=key)
    assert verify(Artifact.open(artifact.folder), allowed).version == 2
    root, config = tmp_path / "root", ssh_config(sshd, ForwardAgent="yes")
    for argv in (
        ["artifact", "verify", artifact.folder, "--allowed-signers", allowed],
        ["artifact", "pack", artifact.folder, tmp_path / "packed.tar"],
        ["artifact", "unpack", tmp_path / "packed.tar", tmp_path / "back"],
        ["push", tmp_path / "back", "device", "--root", root, "--ssh-config", config],
        ["status", "device", "--root", root, "--ssh-config", config, "--json"],
    ):
        done = edgeopt(written, agent, *argv)
        assert done.returncode == 0, done.stderr
    assert "-Y sign" in (written / "argv").read_text() and (root / ".journal").exists()
    assert found_in(secret, key)  # the search finds what is there
    for folder in (written, artifact.folder, tmp_path / "back", root):
        assert found_in(folder, key) == []
    assert not any(needle in (tmp_path / "packed.tar").read_bytes() for needle in (PASSPHRASE.encode(), b"PRIVATE KEY"))


def test_a_device_never_sees_our_agent(sshd, ssh_config, agent, monkeypatch):
    """Also where ~/.ssh/config forwards it: whoever has the device could use every key in it."""
    monkeypatch.setenv("SSH_AUTH_SOCK", agent["SSH_AUTH_SOCK"])
    with connect("device", config=ssh_config(sshd, ForwardAgent="yes")) as connection:
        assert connection.run(["sh", "-c", 'echo "${SSH_AUTH_SOCK-none}"']).text == "none"
