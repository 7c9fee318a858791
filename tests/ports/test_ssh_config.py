"""From a host's name to the machines on the way to it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from edgeopt.errors import HostError, UsageError
from edgeopt.ports import ssh_config, ssh_login


def route(tmp_path, text, host):
    file = tmp_path / "config"
    file.write_text(text)
    return ssh_config.route(host, ssh_login.lookup(file))


@pytest.mark.parametrize(
    ("host", "parts"),
    [
        ("jetson", (None, "jetson", None)),
        ("ann@jetson", ("ann", "jetson", None)),
        ("ann@10.0.0.7:2222", ("ann", "10.0.0.7", 2222)),
        ("jetson:22", (None, "jetson", 22)),
        ("[fe80::1]:2200", (None, "fe80::1", 2200)),
        ("ann@[::1]", ("ann", "::1", None)),
        ("::1", (None, "::1", None)),
        ("a@b@host", ("a@b", "host", None)),
    ],
)
def test_a_host_is_taken_apart(host, parts):
    assert ssh_config.parse(host) == parts


@pytest.mark.parametrize(
    "host", ["", "@host", "host:", "host:x", "host:0", "host:70000", "a b", "-oProxyCommand=id", "[::1", "a/b"]
)
def test_what_is_no_host_is_refused(host):
    with pytest.raises(UsageError, match="is not a host"):
        ssh_config.parse(host)


@pytest.mark.parametrize(
    "host",
    ["ann:s3cret@jetson", "ann:s3cret@jetson:22", "ssh://ann:s3cret@jetson/", "ssh://s3cret@jetson", "a:s3cret@b@c"],
)
def test_a_password_in_a_host_is_refused_and_not_repeated(host):
    with pytest.raises(UsageError, match="a host is no URL") as refused:
        ssh_config.parse(host)
    assert "s3cret" not in str(refused.value) and "s3cret" not in str(refused.value.as_dict())


def test_a_password_in_a_jump_is_refused_and_not_repeated(tmp_path):
    with pytest.raises(UsageError, match="a host is no URL") as refused:
        route(tmp_path, "Host inner\n ProxyJump ann:s3cret@gate\n", "inner")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "silence_s"),
    [
        ("", None),
        ("ServerAliveInterval 10", 15),  # three times, of which we wait half before we ask
        ("ServerAliveInterval 4\n ServerAliveCountMax 1", 2),
        ("ServerAliveInterval 4\n ServerAliveCountMax 0", 2),
        ("ServerAliveInterval 0", None),
    ],
)
def test_the_patience_of_the_configuration_counts(tmp_path, text, silence_s):
    (end,) = route(tmp_path, f"Host device\n {text}\n", "device")
    assert end.silence_s == silence_s


@pytest.mark.parametrize(
    ("text", "only"), [("", False), ("IdentityFile /k", True), ("IdentityFile /k\n IdentitiesOnly no", False)]
)
def test_a_key_that_is_named_is_the_only_one(tmp_path, text, only):
    (end,) = route(tmp_path, f"Host device\n {text}\n", "device")
    assert end.identities_only == only


def test_an_alias_has_what_its_block_says_and_the_command_line_wins(tmp_path):
    text = """
        Host jet*
          HostName 10.0.0.%h
          Port 2222
          User nvidia
          IdentityFile ~/.ssh/jetson
          UserKnownHostsFile /a/known "/b/known"
          GlobalKnownHostsFile none
          ConnectTimeout 3
    """
    (end,) = route(tmp_path, text, "jet7")
    assert (end.host, end.port, end.user) == ("10.0.0.jet7", 2222, "nvidia")
    assert end.identity_files == (Path.home() / ".ssh/jetson",)
    assert end.known_hosts == (Path("/a/known"), Path("/b/known"))
    assert (end.known_as, end.connect_timeout_s) == ("[10.0.0.jet7]:2222", 3)
    (end,) = route(tmp_path, text, "ann@jet7:22")
    assert (end.port, end.user, end.known_as) == (22, "ann", "10.0.0.jet7")


def test_without_a_block_the_defaults_of_ssh_hold(tmp_path):
    (end,) = route(tmp_path, "", "device")
    assert (end.host, end.port) == ("device", 22)
    assert end.identity_files[0] == Path.home() / ".ssh/id_ed25519"
    assert end.known_hosts[0] == Path.home() / ".ssh/known_hosts"
    assert not end.accept_new and not end.identities_only and end.proxy_command is None


def test_jumps_are_followed_in_order_and_through_their_own_blocks(tmp_path):
    text = """
        Host inner
          ProxyJump ann@middle:2201,gate
        Host middle
          HostName middle.lan
          ProxyJump outer
        Host outer
          User bob
        Host gate
          Port 2202
          ProxyJump never
    """
    hops = route(tmp_path, text, "inner")
    assert [(e.user if e.alias != "inner" else "-", e.host, e.port) for e in hops[:2]] == [
        ("bob", "outer", 22), ("ann", "middle.lan", 2201),
    ]  # fmt: skip
    assert [(e.host, e.port) for e in hops[2:]] == [("gate", 2202), ("inner", 22)]


def test_a_circle_of_jumps_is_refused(tmp_path):
    with pytest.raises(HostError, match="more than 8 hosts"):
        route(tmp_path, "Host a\n ProxyJump b\nHost b\n ProxyJump a\n", "a")


def test_proxyjump_none_is_no_jump(tmp_path):
    assert len(route(tmp_path, "Host a\n ProxyJump none\nHost *\n ProxyJump b\n", "a")) == 1


def test_included_files_count_and_their_blocks_end_with_them(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "one").write_text("Host other\n  Port 1111\n")
    text = f"Include {tmp_path}/more/*\nPort 2222\nHost device\n  Include {tmp_path}/more/none*\n  User eve\n"
    assert route(tmp_path, text, "other")[0].port == 1111
    (end,) = route(tmp_path, text, "device")
    assert (end.port, end.user) == (2222, "eve")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Host a\n  Port many\n", "'port' is not a number"),
        ("Host a\n  Nonsense\n", "cannot be understood"),
        ("Include {folder}/config\n", "lead in a circle"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(tmp_path, text, message):
    with pytest.raises(HostError, match=message) as refused:
        route(tmp_path, text.format(folder=tmp_path), "a")
    assert refused.value.where


def test_match_blocks_hold_as_in_ssh_and_unknown_conditions_never_do(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # paramiko's `exec` copies it, and pytest forbids that
    text = """
        Match localnetwork 10.0.0.0/8
          Port 1
        Match host "jet*" exec "test %h = jetson"
          Port 2
        Match host jet* exec "false"
          User eve
        Match all
          Port 3
    """
    (end,) = route(tmp_path, text, "ann@jetson")
    assert (end.port, end.user) == (2, "ann")
    assert route(tmp_path, text, "other")[0].port == 3
    assert "'Match localnetwork' is not understood" in caplog.text


def test_a_configuration_that_is_not_there_is_named(tmp_path):
    with pytest.raises(HostError, match="No such file") as refused:
        ssh_login.lookup(tmp_path / "none")
    assert refused.value.where == str(tmp_path / "none")
