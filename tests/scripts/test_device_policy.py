"""scripts/install-device-policy and what it installs, by themselves; test_policy.py of flows has a device with them."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from edgeopt.flows.sign import sign
from tests.conftest import SCRIPTS, absent
from tests.flows.test_sign import make_key
from tests.tiny import tiny_artifact


@pytest.fixture
def alice(tmp_path):
    """The private key of a signer."""
    return make_key(tmp_path / "alice")


def test_the_policy_is_installed_over_ssh_in_one_command(sshd, ssh_config, tmp_path, alice):
    """The session's own sshd lets root in where tests are root; elsewhere there is no sudo that asks nothing."""
    if os.geteuid() != 0:
        absent("installing a policy needs root")
    (tmp_path / "allowed").write_text("alice@lab " + alice.with_suffix(".pub").read_text())
    prefix = tmp_path / "it's a | & prefix"
    argv = [SCRIPTS / "install-device-policy", "device", "--allowed-signers", tmp_path / "allowed",
            "--prefix", prefix, "--ssh-config", ssh_config(sshd), "--minimum", "tiny=4"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (prefix / "etc/edgeopt/minimum").read_text() == "tiny 4\n"
    said = subprocess.run([prefix / "usr/local/bin/edgeopt-verify", tmp_path], capture_output=True, text=True)
    assert said.returncode == 1 and "not signed" in said.stderr  # it found its policy below that prefix


@pytest.mark.parametrize(
    "argv",
    [[], ["--allowed-signers", "/dev/null"], ["--allowed-signers"], ["--what", "x"], ["--minimum", "tiny=-1"],
     ["--minimum", "tiny"], ["--identity", "a b"], ["--downgrade", "maybe"], ["--prefix", "x"], ["a", "b"],
     ["--allowed-signers", "/etc/passwd", "-oProxyCommand=evil"]],
)  # fmt: skip
def test_wrong_options_of_the_installer_are_refused(argv):
    done = subprocess.run([SCRIPTS / "install-device-policy", *argv], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "missing", ["find", "grep", "cut", "sha256sum", "sed", "head", "tail", "mktemp", "ssh-keygen", "tr"]
)
def test_a_verifier_that_lacks_a_program_accepts_nothing(policy_here, missing):
    """What cannot be checked is not accepted: a missing `comm` once was a yes."""
    verifier, release, programs = policy_here
    assert subprocess.run([verifier, release], capture_output=True).returncode == 0
    (programs / missing).unlink()
    assert subprocess.run([verifier, release], capture_output=True).returncode != 0


@pytest.fixture
def policy_here(tmp_path, alice):
    """(verifier, a release that it accepts, the folder of the only programs that it finds), without a device."""
    if os.geteuid() != 0:
        absent("installing a policy needs root")
    (tmp_path / "allowed").write_text("alice@lab " + alice.with_suffix(".pub").read_text())
    argv = [SCRIPTS / "install-device-policy", "--allowed-signers", tmp_path / "allowed", "--prefix", tmp_path]
    subprocess.run(argv, check=True, capture_output=True)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("find", "grep", "cut", "sha256sum", "sed", "head", "tail", "mktemp", "ssh-keygen", "tr", "rm"):
        (programs / name).symlink_to(shutil.which(name))
    verifier = tmp_path / "usr" / "local" / "bin" / "edgeopt-verify"
    text = verifier.read_text()
    verifier.write_text(text.replace("PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"PATH='{programs}'"))
    artifact = tiny_artifact(tmp_path, torchscript=False)
    sign(artifact, alice)
    return verifier, artifact.folder, programs
