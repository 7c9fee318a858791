"""Whether aarch64 programs run here, and words for when they do not (case D04)."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from edgeopt.errors import DeviceError
from edgeopt.ports import emulation
from tests.conftest import absent

ENTRY = "{state}\ninterpreter /usr/bin/qemu-aarch64-static\nflags: {flags}\noffset 0\nmagic 7f454c46\n"
emulated = pytest.mark.skipif(platform.machine() != "x86_64", reason="aarch64 runs natively here")


@pytest.fixture
def binfmt(tmp_path):
    def write(state: str = "enabled", flags: str = "PF", status: str = "enabled") -> Path:
        (tmp_path / "status").write_text(f"{status}\n")
        (tmp_path / "qemu-aarch64").write_text(ENTRY.format(state=state, flags=flags))
        return tmp_path

    return write


def answering(status: int, said: str, version: str = "7.2.22"):
    """What runs commands: the emulator tells its version, the probe ends so."""

    def run(argv: list[str]) -> tuple[int, str]:
        return (0, f"qemu-aarch64 version {version} (Debian)") if "--version" in argv else (status, said)

    return run


def test_a_program_really_runs():
    found = emulation.preflight()
    if found.problem:
        absent(f"{found.problem} ({found.todo})")
    assert found.native or found.version and found.flags
    assert found.check() is found and "aarch64 runs" in str(found)


@emulated
@pytest.mark.parametrize(
    "status, said, words",
    [
        (139, "", "segmentation fault (status 139)"),
        (-11, "", "segmentation fault (status 139)"),
        (139, "qemu: uncaught target signal 11 (Segmentation fault) - core dumped", "segmentation fault"),
        (126, "Exec format error", "exec format error"),
        (3, "odd", "ended with status 3: odd"),
    ],
)
def test_how_the_probe_ends_is_said_in_words_with_what_to_do(binfmt, status, said, words):
    found = emulation.preflight(binfmt(), answering(status, said))
    assert words in found.problem and found.todo
    with pytest.raises(DeviceError, match="this machine"):
        found.check()


@emulated
@pytest.mark.parametrize(
    "how, words",
    [
        ({"state": "disabled"}, "is disabled"),
        ({"status": "disabled"}, "is disabled"),
        ({"flags": "P"}, "without the flag F"),
    ],
)
def test_a_registration_that_does_not_serve_is_said(binfmt, how, words):
    found = emulation.preflight(binfmt(**how), answering(42, ""))
    assert words in found.problem and "update-binfmts" in found.todo or "apt install" in found.todo


@emulated
def test_what_is_missing_is_said_in_one_sentence(tmp_path):
    assert "binfmt_misc is not mounted" in emulation.preflight(tmp_path).problem
    (tmp_path / "status").write_text("enabled\n")
    found = emulation.preflight(tmp_path)
    assert "not registered" in found.problem and "qemu-user-static" in found.todo


@emulated
@pytest.mark.parametrize("version, warned", [("7.2.22", False), ("8.1.5", True), ("9.2.0", True), ("10.0.2", False)])
def test_versions_that_are_known_to_crash_are_warned_of(binfmt, version, warned):
    found = emulation.preflight(binfmt(), answering(42, "", version))
    assert found.problem is None and found.version == version and bool(found.warning) == warned


def test_a_crash_names_what_is_known_against_the_version():
    assert "tonistiigi" in emulation.explain(139, "", "8.1.5")
    assert emulation.explain(1, "no such file") is None


@pytest.mark.parametrize(
    "text, version", [("qemu-aarch64 version 7.2.22 (Debian 1:7.2+dfsg-7)", "7.2.22"), ("", None), ("version x", None)]
)
def test_versions_are_read(text, version):
    assert emulation.parse_version(text) == version
