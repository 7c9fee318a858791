"""Host keys, keys, agents and jump hosts, against real OpenSSH servers (cases S10 and S11 of the notes on SSH)."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys

import pytest

from edgeopt.errors import HostError, HostKeyError
from edgeopt.ports.connect import connect


def fingerprint(server, key: str = "host_key") -> str:
    said = subprocess.run(["ssh-keygen", "-lf", server.folder / f"{key}.pub"], capture_output=True, text=True)
    return said.stdout.split()[1]


def reach(config, host: str = "device", **options) -> str:
    with connect(host, config=config, **options) as connection:
        return connection.run(["echo", "reached"]).text


def refusal(config, kind=HostError, **options) -> str:
    with pytest.raises(kind) as refused:
        reach(config, **options)
    assert refused.value.todo and refused.value.where
    return str(refused.value)


def test_an_unknown_host_key_is_refused_with_all_that_is_needed(sshd, ssh_config, tmp_path):
    file = tmp_path / "none" / "known_hosts"
    message = refusal(ssh_config(sshd, UserKnownHostsFile=file, HostKeyAlias=None), HostKeyError)
    for part in (f"127.0.0.1:{sshd.port}", fingerprint(sshd), str(file), f"ssh-keyscan -p {sshd.port} 127.0.0.1"):
        assert part in message
    assert not file.exists()


def test_the_command_that_the_refusal_names_mends_it(sshd, ssh_config, tmp_path):
    config = ssh_config(sshd, UserKnownHostsFile=tmp_path / "known_hosts", HostKeyAlias=None)
    command = re.search(r"ssh-keyscan .*? >> \S+?(?=,)", refusal(config, HostKeyError))[0]
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert reach(config) == "reached"


def test_accept_new_writes_the_key_down_and_then_knows_it(sshd, ssh_config, tmp_path):
    config = ssh_config(sshd, UserKnownHostsFile=tmp_path / "ssh" / "known_hosts", HostKeyAlias=None)
    assert reach(config, accept_new=True) == "reached"
    assert reach(config) == "reached"
    said = subprocess.run(["ssh", "-F", config, "device", "echo hi"], capture_output=True, text=True)
    assert said.stdout == "hi\n", said.stderr  # OpenSSH reads what we wrote


def test_strict_host_key_checking_accept_new_of_the_configuration_counts(sshd, ssh_config, tmp_path):
    options = {"UserKnownHostsFile": tmp_path / "known_hosts", "HostKeyAlias": None}
    assert reach(ssh_config(sshd, StrictHostKeyChecking="accept-new", **options)) == "reached"
    (tmp_path / "known_hosts").unlink()
    refusal(ssh_config(sshd, StrictHostKeyChecking="no", **options), HostKeyError)


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_host_key_is_refused_with_both_fingerprints(
    sshd, start_sshd, ssh_config, tmp_path, accept_new
):  # S10
    other = start_sshd("other")
    known = (other.folder / "host_key.pub").read_text().split()
    file = tmp_path / "known_hosts"
    file.write_text(f"# the device of old\n[127.0.0.1]:{sshd.port} {known[0]} {known[1]}\n")
    before = file.read_bytes()
    config = ssh_config(sshd, UserKnownHostsFile=file, HostKeyAlias=None)
    message = refusal(config, HostKeyError, accept_new=accept_new)
    for part in (f"127.0.0.1:{sshd.port}", fingerprint(sshd), fingerprint(other), f"{file}, line 2", "ssh-keygen -R"):
        assert part in message
    assert file.read_bytes() == before


def test_a_host_known_by_another_type_of_key_is_asked_for_that_one(start_sshd, ssh_config, tmp_path):
    key = tmp_path / "rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", key], check=True)
    server = start_sshd("two-keys", f"HostKey {key}")
    kind, blob, *_ = (tmp_path / "rsa.pub").read_text().split()
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {kind} {blob}\n")
    assert reach(ssh_config(server, UserKnownHostsFile=tmp_path / "known_hosts")) == "reached"


def test_a_refused_login_names_user_and_keys(sshd, ssh_config, tmp_path):
    key = make_key(tmp_path / "stranger")
    message = refusal(ssh_config(sshd, IdentityFile=key, User="nobody-here"))
    assert "login refused for user 'nobody-here'" in message and str(key) in message
    message = refusal(ssh_config(sshd, IdentityFile=tmp_path / "none"))
    assert "tried no key" in message


def test_a_key_that_cannot_be_read_is_named(sshd, ssh_config, tmp_path):
    (tmp_path / "broken").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nnonsense\n")
    assert f"{tmp_path / 'broken'} (not readable" in refusal(ssh_config(sshd, IdentityFile=tmp_path / "broken"))


def test_an_encrypted_key_without_agent_says_ssh_add(sshd, ssh_config, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = make_key(tmp_path / "locked", passphrase="secret words")
    message = refusal(ssh_config(sshd, IdentityFile=key))
    assert f"the key {key} is encrypted" in message and f"ssh-add {key}" in message


def test_an_agent_that_holds_the_key_is_asked(sshd, ssh_config, tmp_path, monkeypatch):
    if shutil.which("ssh-agent") is None:
        pytest.fail("OpenSSH's client is installed without ssh-agent")
    key = tmp_path / "client_key"
    shutil.copy(sshd.folder / "client_key", key)
    shutil.copy(sshd.folder / "client_key.pub", tmp_path / "client_key.pub")
    with agent_with(key, tmp_path, monkeypatch):
        # the key file now cannot be used by itself
        subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret words", "-f", key], check=True, capture_output=True)
        assert reach(ssh_config(sshd, IdentityFile=key)) == "reached"
        # without IdentitiesOnly any key of the agent will do, with it only those that are named
        assert reach(ssh_config(sshd, IdentityFile=tmp_path / "none", IdentitiesOnly="no")) == "reached"
        refusal(ssh_config(sshd, IdentityFile=tmp_path / "none", IdentitiesOnly="yes"))


@contextlib.contextmanager
def agent_with(key, tmp_path, monkeypatch, *more):
    """A real ssh-agent that holds `key`."""
    said = subprocess.run(["ssh-agent", "-s", "-a", tmp_path / "agent"], capture_output=True, text=True, check=True)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        subprocess.run(["ssh-add", "-q", *more, key], check=True, capture_output=True)
        yield
    finally:
        os.kill(int(re.search(r"SSH_AGENT_PID=(\d+)", said.stdout)[1]), signal.SIGTERM)


def test_no_key_of_the_agent_is_offered_where_one_is_configured(start_sshd, ssh_config, tmp_path, monkeypatch):
    server = start_sshd("verbose", "LogLevel VERBOSE")
    stranger = make_key(tmp_path / "stranger")
    shown = subprocess.run(["ssh-keygen", "-lf", stranger], capture_output=True, text=True).stdout.split()[1]
    with agent_with(stranger, tmp_path, monkeypatch):
        assert reach(ssh_config(server, IdentitiesOnly=None)) == "reached"
        assert shown not in (server.folder / "sshd.log").read_text()
        refusal(ssh_config(server, IdentitiesOnly="no", IdentityFile=tmp_path / "none"))
        assert shown in (server.folder / "sshd.log").read_text()  # what sshd would have seen


@pytest.fixture
def signed(start_sshd, tmp_path):
    """(server, key, certificate): a server that trusts an authority, and no key by itself."""
    authority, key = make_key(tmp_path / "authority"), make_key(tmp_path / "user_key")
    server = start_sshd("signed", f"TrustedUserCAKeys {authority}.pub")
    (server.folder / "authorized_keys").write_text("")
    me = pwd.getpwuid(os.getuid()).pw_name
    sign = ["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", me, f"{key}.pub"]
    subprocess.run(sign, check=True, capture_output=True)
    return server, key, tmp_path / "user_key-cert.pub"


@pytest.mark.parametrize("where", ["beside the key", "CertificateFile", "agent"])
def test_a_certificate_of_the_users_key_is_shown(signed, ssh_config, tmp_path, monkeypatch, where):
    server, key, certificate = signed
    if where == "agent":
        with agent_with(key, tmp_path, monkeypatch):
            for file in (key, certificate):
                file.unlink()
            assert reach(ssh_config(server, IdentityFile=None, IdentitiesOnly="no")) == "reached"
        return
    options = {"IdentityFile": key}
    if where == "CertificateFile":
        options["CertificateFile"] = certificate.rename(tmp_path / "elsewhere.pub")
    assert reach(ssh_config(server, **options)) == "reached"
    (tmp_path / "elsewhere.pub" if where == "CertificateFile" else certificate).unlink()
    message = refusal(ssh_config(server, **options))
    assert "login refused" in message and str(key) in message


def test_a_certificate_of_another_key_does_no_harm(sshd, signed, ssh_config):
    _, _, certificate = signed
    assert reach(ssh_config(sshd, CertificateFile=certificate)) == "reached"


def test_a_certificate_authority_for_hosts_is_named_as_what_is_not_checked(sshd, ssh_config, tmp_path):
    authority = make_key(tmp_path / "authority")
    kind, blob, *_ = (tmp_path / "authority.pub").read_text().split()
    (tmp_path / "known_hosts").write_text(f"# ours\n@cert-authority *,[127.0.0.1]:{sshd.port} {kind} {blob}\n")
    config = ssh_config(sshd, UserKnownHostsFile=tmp_path / "known_hosts", HostKeyAlias=None)
    message = refusal(config, HostKeyError)
    assert f"its certificate ({tmp_path / 'known_hosts'}, line 2) cannot be checked here" in message
    assert fingerprint(sshd) in message and authority


def test_a_password_on_the_command_line_is_in_no_output():
    for host, how in (("ann:s3cret@127.0.0.1", "--debug"), ("ssh://ann:s3cret@127.0.0.1:22", "--json")):
        argv = [sys.executable, "-m", "edgeopt", "rollback", "digits", host, how]
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode != 0 and "no URL" in done.stdout + done.stderr
        assert "s3cret" not in done.stdout + done.stderr


def test_a_server_that_wants_a_password_is_told_of(start_sshd, ssh_config):
    server = start_sshd("no-keys", "PubkeyAuthentication no", "PasswordAuthentication yes")
    assert "login with a key is not allowed" in refusal(ssh_config(server))


@pytest.mark.parametrize("jumps", [1, 2])
def test_jump_hosts_are_gone_through(sshd, start_sshd, ssh_config, tmp_path, jumps):  # S11
    gates = [start_sshd(f"gate{i}") for i in range(jumps)]
    config = ssh_config(sshd, ProxyJump=",".join(f"gate{i}" for i in range(jumps)))
    for i, gate in enumerate(gates):
        config.write_text(config.read_text() + block(f"gate{i}", gate))
    assert reach(config) == "reached"
    for gate in gates:
        assert "Accepted publickey" in (gate.folder / "sshd.log").read_text()


def test_a_proxy_command_is_run(sshd, start_sshd, ssh_config, tmp_path):
    gate = start_sshd("gate")
    gate_config = tmp_path / "gate_config"
    gate_config.write_text(block("gate", gate))
    command = f"ssh -F {gate_config} -W %h:%p gate"
    assert reach(ssh_config(sshd, ProxyCommand=command)) == "reached"
    assert "Accepted publickey" in (gate.folder / "sshd.log").read_text()
    assert "cannot connect" in refusal(ssh_config(sshd, ProxyCommand="false"))


def test_what_fails_behind_a_jump_host_is_named(sshd, start_sshd, ssh_config):
    gate = start_sshd("gate", "AllowTcpForwarding no")
    config = ssh_config(sshd, ProxyJump="gate")
    config.write_text(config.read_text() + block("gate", gate))
    message = refusal(config)
    assert "the jump host does not let us through" in message and f"127.0.0.1:{sshd.port}" in message


def test_user_host_and_port_need_no_block(sshd, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    shutil.copy(sshd.folder / "client_key", tmp_path / ".ssh" / "id_ed25519")
    shutil.copy(sshd.known_hosts, tmp_path / ".ssh" / "known_hosts")
    assert reach(None, f"127.0.0.1:{sshd.port}") == "reached"


def make_key(path, passphrase: str = ""):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path], check=True)
    return path


def block(name: str, server) -> str:
    """The block of a jump host: as the server's own ssh_config, under another name."""
    return server.config.read_text().replace("edgeopt-demo", name)
