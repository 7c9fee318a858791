"""What `edgeopt detect` shows people."""

from __future__ import annotations

import pytest

from edgeopt.cli import detect as command
from edgeopt.device import facts, matching
from edgeopt.flows.detect import Detected
from edgeopt.spec.facts import DeviceFacts
from tests.device.recordings import FOLDER


def shown(found: DeviceFacts, capsys, all_profiles: bool = False) -> str:
    detected = Detected("device", found, tuple(matching.fits(found)))
    command._print(command.fact_rows(detected))
    command._print(command.profile_rows(detected, all_profiles))
    return capsys.readouterr().out


def test_a_jetson(capsys):
    text = shown(facts.recorded(FOLDER / "tx2-r32"), capsys)
    for line in (
        "device       quill, module tx2, tegra186, sm_62",
        "jetpack      4.6, L4T 32.7.6",
        "cpu          Cortex-A57, 6 cores, 2 of them off",
        "disk         /tmp, 4.9 GiB free of 27.4 GiB, NOT WRITABLE",
        "power mode   MAXP_CORE_ARM (3), of MAXN MAXQ MAXP_CORE_ALL MAXP_CORE_ARM MAXP_CORE_DENVER",
        "clocks       gpu 625 of 1122 MHz, cpu 346 of 1574 MHz",
        "arm64-cpu  fits",
        "9 other profiles do not fit: --all says why",
    ):
        assert line in text, line


def test_all_profiles_with_their_reasons(capsys):
    text = shown(facts.recorded(FOLDER / "raspberry-pi-5"), capsys, all_profiles=True)
    assert "x86-cpu" in text and "it is for x86_64, the device is aarch64" in text and "--all" not in text


def test_what_is_unknown_has_no_row_and_emulation_stands_out(capsys):
    assert shown(DeviceFacts(), capsys).splitlines()[0] == "sensors  none that can be read"
    text = shown(DeviceFacts(model="Board", emulated="qemu-user 7.2", clock_skew_s=-3600.4, swap_bytes=0), capsys)
    assert "EMULATED  qemu-user 7.2: nothing that is timed here is a device's latency" in text
    assert "clock     3600 s behind this machine" in text and "no swap" in text


@pytest.mark.parametrize("hostile", ["\x1b[2Jx", "a\nFITS all", "[red]x[/red]", "\x9b31m", "‮abc"])
def test_words_of_the_device_do_not_steer_the_terminal(capsys, hostile):
    text = shown(DeviceFacts(model=hostile), capsys)
    assert "\x1b" not in text and "\x9b" not in text and "‮" not in text and "\nFITS all" not in text
    assert ("[red]x[/red]" in text) == ("red" in hostile)
