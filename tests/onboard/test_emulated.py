"""Whether the runner knows that the CPU under it is an emulator's."""

from __future__ import annotations

import json
import platform

import pytest

from edgeopt.onboard import environment

X86 = "processor\t: 0\nmodel name\t: {}\nflags\t\t: fpu sse2 hypervisor\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(NAME, {path: text}): this machine is of that kind, with those files alone."""

    def write(name: str, files: dict[str, str]) -> str:
        monkeypatch.setattr(platform, "machine", lambda: name)
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return str(tmp_path)

    return write


MARK = environment.MARK.lstrip("/")
FW_CFG = "sys/firmware/devicetree/base/fw-cfg@9020000/compatible"
BOARD = "sys/firmware/devicetree/base/compatible"
CASES = {
    "the virtual device": ("aarch64", {MARK: json.dumps({"emulator": "qemu-user 7.2.22"})}, "qemu-user 7.2.22"),
    "a mark that is damaged": ("aarch64", {MARK: "{", BOARD: "nvidia,tegra194"}, None),
    "a mark that is a list": ("aarch64", {MARK: "[]"}, None),
    "a machine of qemu": ("aarch64", {FW_CFG: "qemu,fw-cfg-mmio"}, "qemu-system"),
    "a board": ("aarch64", {BOARD: "nvidia,p2972-0000\0nvidia,tegra194\0"}, None),
    "an emulated x86": ("x86_64", {"proc/cpuinfo": X86.format("QEMU TCG CPU version 2.5+")}, "qemu-system"),
    "a cloud's machine": ("x86_64", {"proc/cpuinfo": X86.format("Intel(R) Xeon(R) Processor @ 2.90GHz")}, None),
    "nothing that can be read": ("x86_64", {}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_what_runs_the_programs_is_told_by_marks_that_a_device_does_not_have(machine, name):
    kind, files, expected = CASES[name]
    assert environment.emulator(machine(kind, files)) == expected


def test_this_machine_says_it_in_the_report():
    assert environment.describe()["emulated"] == environment.emulator()
