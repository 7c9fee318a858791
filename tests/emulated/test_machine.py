"""The virtual Jetson of tier 2 itself."""

from __future__ import annotations

import pytest

from edgeopt.errors import UsageError
from edgeopt.ports.connection import script
from edgeopt.ports.ssh import SSHConnection
from edgeopt.testing import Faults, virtual_device

pytestmark = pytest.mark.machine


def said(device, text: str) -> str:
    with SSHConnection(device.host, config=device.config, silence_s=120) as connection:
        return connection.run(script(text), check=False, timeout_s=300).text


def test_the_kernel_shows_the_recorded_board(machine):
    found = said(
        machine, "uname -m; tr '\\0' ' ' < /proc/device-tree/compatible; nvpmodel -q; cat /etc/nv_tegra_release"
    )
    assert found.startswith("aarch64\nnvidia,") and "nvidia,tegra194 linux,dummy-virt" in found
    assert "MODE_30W_ALL" in found and "# R35" in found


def test_what_was_flushed_outlives_a_power_cut_and_what_was_not_does_not(machine):
    said(machine, "echo kept > kept; sync; echo lost > lost")
    machine.power_cut()
    assert machine.pid is None
    machine.boot()
    assert said(machine, "cat kept; ls") == "kept\nkept"


def test_what_a_machine_cannot_have_is_refused():
    with pytest.raises(UsageError, match="tmp_mb"), virtual_device(tier=2, faults=Faults(tmp_mb=1)):
        pass
