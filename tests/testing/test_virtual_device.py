"""The virtual Jetson of tier 1: what runs there, what can be wrong with it, and that nothing of it is left."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt.errors import HostError, UsageError
from edgeopt.onboard import environment
from edgeopt.ports import emulation
from edgeopt.ports.connection import script
from edgeopt.ports.ssh import SSHConnection
from edgeopt.testing import Faults, arm64_root, virtual_device
from edgeopt.testing.recordings import recordings
from tests.conftest import wait_until


def connect(device) -> SSHConnection:
    return SSHConnection(device.host, config=device.config)


def sh(connection, text: str):
    return connection.run(script(text), check=False, timeout_s=120)


@pytest.fixture(scope="module")
def device(virtual_jetson_cache):
    with virtual_device(cache=virtual_jetson_cache) as device, connect(device) as connection:
        yield device, connection


def test_programs_are_aarch64_on_the_recorded_kernel(device):
    _, connection = device
    said = sh(connection, "uname -srm; hostname; id -un; python3 -c 'import platform; print(platform.machine())'")
    assert said.text.splitlines() == ["Linux 5.10.216-tegra aarch64", "virtual-jetson", "nvidia", "aarch64"]


def test_what_was_recorded_is_read_as_on_the_board(device):
    _, connection = device
    said = sh(connection, "head -c 14 /etc/nv_tegra_release; tr '\\0' ' ' < /sys/firmware/devicetree/base/compatible; "
              "grep -m 1 MemTotal /proc/meminfo; cat /sys/class/thermal/thermal_zone0/temp")  # fmt: skip
    assert said.status == 0 and said.text.startswith("# R35 (release")
    assert "nvidia,tegra194" in said.text and "MemTotal:" in said.text


def test_the_runner_finds_out_that_it_is_emulated_with_and_without_the_mark(device):
    _, connection = device
    source = inspect.getsource(environment) + "\nprint(emulator(), emulator('/nowhere'))\n"
    said = connection.run(["python3", "-"], stdin=source.encode(), timeout_s=120).text
    assert said == f"qemu-user {emulation.preflight().version} qemu-user"


def test_tegrastats_replays_and_nvpmodel_switches_as_root_only(device):
    _, connection = device
    said = sh(connection, "timeout 60 tegrastats --interval 50 | head -n 2").text.splitlines()
    assert len(said) == 2 and all(line.startswith("RAM ") for line in said)
    assert sh(connection, "nvpmodel -q").text.splitlines()[-2:] == ["NV Power Mode: MODE_30W_ALL", "3"]
    assert "Permission denied" in sh(connection, "nvpmodel -m 0").text
    sh(connection, "sudo -n nvpmodel -m 0")
    assert sh(connection, "nvpmodel -q").text.splitlines()[-2:] == ["NV Power Mode: MAXN", "0"]
    sh(connection, "sudo -n nvpmodel -m 3")


def test_trtexec_is_of_the_recorded_version_and_says_that_it_is_simulated(device):
    _, connection = device
    said = sh(connection, "/usr/src/tensorrt/bin/trtexec --help").text
    assert "[TensorRT v8502]" in said and "simulated: " in said


def test_its_files_are_at_hand_and_outlive_a_reboot(virtual_jetson_cache, tmp_path):
    with virtual_device(cache=virtual_jetson_cache, folder=tmp_path / "d") as device:
        with connect(device) as connection:
            sh(connection, "echo kept > file")
        assert (device.home / "file").read_text() == "kept\n"
        device.reboot()
        with connect(device) as connection:
            assert sh(connection, "cat file").text == "kept"


FAULTS = {
    "no_python": (Faults(no_python=True), "command -v python3 && exit 1; echo none", "none"),
    "read_only_home": (Faults(read_only_home=True), "touch ~/x 2>&1", "Read-only file system"),
    "tmp_mb": (Faults(tmp_mb=1), "head -c 2000000 /dev/zero 2>&1 > /tmp/x || df -m /tmp | tail -n 1", "100%"),
    "disk_mb": (Faults(disk_mb=4), "dd if=/dev/zero of=x bs=1M count=8 2>&1", "No space left on device"),
    "clock": (Faults(clock_offset_s=-400 * 86400), "echo $(( ($(date +%s) + 400 * 86400) / 1000 ))", "CLOCK"),
    "password": (Faults(sudo="password"), "sudo -n true 2>&1", "a password is required"),
    "tegrastats_root": (Faults(tegrastats="root"), "tegrastats 2>&1", "root"),
    "tegrastats_missing": (Faults(tegrastats="missing"), "command -v tegrastats || echo none", "none"),
    "nvpmodel_keeps": (Faults(nvpmodel="keeps"), "sudo nvpmodel -m 0 && nvpmodel -q", "MODE_30W_ALL"),
    "nvpmodel_reboot": (Faults(nvpmodel="reboot"), "echo no | sudo nvpmodel -m 0; nvpmodel -q", "MODE_30W_ALL"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_as_on_a_device_that_has_it(virtual_jetson_cache, name):
    faults, command, expected = FAULTS[name]
    with virtual_device(cache=virtual_jetson_cache, faults=faults) as device, connect(device) as connection:
        said = sh(connection, command).text
    if expected == "CLOCK":
        assert abs(int(said) - int(float(os.popen("date +%s").read()) / 1000)) <= 1
    else:
        assert expected in said


@pytest.mark.parametrize("shell, command", [("/bin/bash", "echo $((1 + 1))"), ("/usr/bin/fish", "echo (math 1 + 1)")])
def test_the_login_shell_is_the_one_asked_for_and_its_start_up_file_is_noisy(virtual_jetson_cache, shell, command):
    with virtual_device(cache=virtual_jetson_cache, faults=Faults(shell=shell, noise="welcome")) as device:
        argv = ["ssh", "-F", str(device.config), device.host, command]
        assert subprocess.run(argv, capture_output=True, text=True).stdout == "welcome\n2\n"


@pytest.mark.parametrize("how", ["exception", "killed"])
def test_nothing_is_left_however_the_block_ends(virtual_jetson_cache, tmp_path, how):
    code = (
        "import sys, time; from pathlib import Path; from edgeopt.testing import virtual_device\n"
        "with virtual_device(cache=Path(sys.argv[1]), folder=Path(sys.argv[2])) as device:\n"
        "    print(device.pid, *device._runs.processes(), flush=True)\n"
        "    raise KeyboardInterrupt if sys.argv[3] == 'exception' else time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", code, str(virtual_jetson_cache), str(tmp_path / "d"), how]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as user:
        pids = [int(pid) for pid in user.stdout.readline().split()]
        if how == "killed":
            user.send_signal(signal.SIGKILL)
        user.wait()
    assert len(pids) >= 3  # unshare, the first process, sshd
    assert wait_until(lambda: not any(running(pid) for pid in pids))
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_device_that_is_not_recorded_is_refused_with_those_that_are():
    with pytest.raises(UsageError) as refused, virtual_device("toaster"):
        pass
    assert all(name in str(refused.value) for name in recordings())


def test_a_build_that_was_cut_is_never_used(tmp_path):
    def build(folder: Path):
        (folder / "half").write_text("")
        raise HostError("the mirror is gone")

    with pytest.raises(HostError):
        arm64_root.cached(tmp_path / "root", build)
    (tmp_path / "root.part-killed").mkdir()
    made = arm64_root.cached(tmp_path / "root", lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "root.lock"]
