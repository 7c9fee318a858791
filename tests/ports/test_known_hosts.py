"""Host keys: found as ssh finds them, and the three answers: known, unknown, changed."""

from __future__ import annotations

import base64
import subprocess

import pytest

from edgeopt.errors import HostKeyError
from edgeopt.ports import known_hosts
from edgeopt.ports.known_hosts import HostKey

KEY, OTHER = HostKey("ssh-ed25519", b"key"), HostKey("ssh-ed25519", b"other")


def line(names: str, key: HostKey = KEY) -> str:
    return f"{names} {key.kind} {base64.b64encode(key.blob).decode()} a comment\n"


@pytest.fixture
def known(tmp_path):
    def find(text: str, name: str):
        (tmp_path / "known_hosts").write_text(text)
        return known_hosts.known_keys([tmp_path / "missing", tmp_path / "known_hosts"], name)

    return find


@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        ("device", "device", True),
        ("DEVICE", "device", True),
        ("device", "device2", False),
        ("a,device,b", "device", True),
        ("[device]:2222", "[device]:2222", True),
        ("[device]:2222", "device", False),
        ("device", "[device]:2222", False),
        ("*.lan", "jetson.lan", True),
        ("10.0.0.?", "10.0.0.7", True),
        ("*.lan,!bad.lan", "bad.lan", False),
        ("@cert-authority *", "device", False),
        ("# device", "device", False),
    ],
)
def test_entries_are_matched_as_sshd_8_says(known, names, name, found):
    assert bool(known(line(names), name)) == found


def test_hashed_names_are_found_in_a_file_that_openssh_hashed(tmp_path, sshd):
    file = tmp_path / "known_hosts"
    file.write_bytes(sshd.known_hosts.read_bytes())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    assert file.read_text().startswith("|1|")
    (entry,) = known_hosts.known_keys([file], f"[127.0.0.1]:{sshd.port}")
    said = subprocess.run(["ssh-keygen", "-lf", str(sshd.folder / "host_key.pub")], capture_output=True, text=True)
    assert entry.key.fingerprint == said.stdout.split()[1]
    assert known_hosts.known_keys([file], "127.0.0.1") == []


def test_broken_lines_are_passed_over(known):
    assert len(known("\n\ndevice ssh-ed25519\ndevice ssh-ed25519 !!!\n\xff\n" + line("device"), "device")) == 1


def test_a_known_key_is_accepted_and_a_stranger_is_not(known):
    assert known_hosts.check(KEY, known(line("device"), "device"), where="device:22", name="device") is True
    assert known_hosts.check(KEY, [], where="device:22", name="device") is False


def test_a_changed_key_names_both_fingerprints_and_the_line(known, tmp_path):
    entries = known("# first\n" + line("device"), "device")
    with pytest.raises(HostKeyError) as refused:
        known_hosts.check(OTHER, entries, where="device:22", name="device")
    message = str(refused.value)
    assert OTHER.fingerprint in message and KEY.fingerprint in message
    assert f"{tmp_path / 'known_hosts'}, line 2" in message and "device:22" in message


def test_a_revoked_key_is_refused_even_where_it_is_known(known):
    entries = known(line("device") + line("@revoked device"), "device")
    with pytest.raises(HostKeyError, match="revoked"):
        known_hosts.check(KEY, entries, where="device:22", name="device")


def test_an_added_key_is_found_again_and_the_file_is_private(tmp_path):
    file = tmp_path / "ssh" / "known_hosts"
    known_hosts.add(KEY, "[device]:2222", file)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text(file.read_text().rstrip("\n"))  # as an editor may leave it
    known_hosts.add(OTHER, "b", file)
    assert known_hosts.known_keys([file], "[device]:2222")[0].key == KEY
    assert known_hosts.known_keys([file], "b")[0].key == OTHER
