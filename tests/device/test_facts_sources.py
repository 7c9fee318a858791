"""The round trip itself: real shells, devices that lack tools, tools that hang, output that pretends."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys

import pytest

from edgeopt.device import facts, facts_sources
from edgeopt.device.facts_sources import Command, File, Names, Values
from edgeopt.errors import DeviceError
from edgeopt.onboard import environment
from edgeopt.ports.connect import connect
from edgeopt.ports.local import LocalConnection
from tests.conftest import absent
from tests.device.recordings import Shell, tools
from tests.pythons import require

SHELLS = {
    "dash": ["dash", "-c"],
    "bash": ["bash", "-c"],
    "bash as sh": ["bash", "--posix", "-c"],
    "busybox": ["busybox", "sh", "-c"],
}


@pytest.fixture(params=SHELLS)
def shell(request):
    argv = SHELLS[request.param]
    path = shutil.which(argv[0])
    if path is None:
        absent(f"{argv[0]} is not installed")
    return [path, *argv[1:-1]]


def test_every_posix_shell_answers_the_same(shell, tmp_path):
    device = Shell(tools(tmp_path / "bin", "getconf", "timeout", nvpmodel="echo 'NV Power Mode: 15W'; echo 2"), shell)
    found = facts.read(device, python=sys.executable, root="/tmp/it's here/\\new")
    own = facts.read(LocalConnection(), python=sys.executable)
    assert device.runs == 1  # one round trip
    same = ("arch", "kernel", "system", "libc", "cpu_model", "cpu_count", "memory_bytes", "python", "packages", "user")
    assert {name: getattr(found, name) for name in same} == {name: getattr(own, name) for name in same}
    assert (found.shell, found.home) == ("/bin/own", str(tmp_path / "bin"))
    assert (found.power_mode.name, found.power_mode.id) == ("15W", 2)
    assert [d.path for d in found.disks] == ["/tmp/it's here/\\new", found.home, "/tmp"]
    assert all(d.writable and 0 < d.free_bytes <= d.total_bytes for d in found.disks)
    assert found.commands["nvpmodel"] == str(tmp_path / "bin" / "nvpmodel")
    assert abs(found.clock_skew_s) < 60


# busybox before 1.30 wants its seconds after -t
OLD_TIMEOUT = """[ "$1 $2 $3" = "-s KILL -t" ] || exit 1
s=$4
shift 4; exec %s -s KILL "$s" "$@"
"""


@pytest.mark.parametrize("limiter", ["timeout", "old busybox", "none"])
def test_a_tool_that_hangs_keeps_nothing_but_its_own_fact(tmp_path, monkeypatch, limiter):
    hangs = 'trap "" TERM INT HUP; echo begun; while :; do sleep 1; done'
    old = {"timeout": OLD_TIMEOUT % shutil.which("timeout")} if limiter == "old busybox" else {}
    linked = ["timeout"] if limiter == "timeout" else []
    folder = tools(tmp_path / "bin", *linked, stuck=hangs, after="echo here", **old)
    monkeypatch.setattr(facts_sources, "SOURCES", (
        File("first", ("/etc/os-release",)), Command("stuck", ("stuck",), 1), Command("after", ("after",)),
    ))  # fmt: skip
    found = facts_sources.ask(Shell(folder, ["/bin/sh"]))
    assert found.of("stuck") in ("begun\n", "")  # what it said before
    assert found.of("after") == "here\n" and found.of("first")
    assert found.of("date-end") and "end" in found.texts


SMI = {
    "new": """case $* in *compute_cap*) echo "RTX, 8.9, 570, 1, 210, 3105, 38";; *) echo "CUDA Version: 12.8";; esac""",
    "old": """case $* in *compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;;
*name*) echo RTX;; *) echo "CUDA Version: 11.4";; esac""",
    "broken": """echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9""",
}


@pytest.mark.parametrize(
    ("driver", "said"),
    [("new", (("RTX",), "8.9", "12.8")), ("old", (("RTX",), None, "11.4")), ("broken", ((), None, None))],
)
def test_nvidia_smi_of_any_age(tmp_path, driver, said):
    found = facts.read(Shell(tools(tmp_path / "bin", nvidia_smi=SMI[driver]), ["/bin/sh"]))
    assert (found.gpus, found.sm, found.cuda) == said


def test_a_device_that_stops_answering_is_told_by_what_came(tmp_path, monkeypatch):
    """A tool that cannot even be killed (a driver that hangs in the kernel): here our own deadline ends the command."""
    folder = tools(tmp_path / "bin", stuck="sleep 600")
    monkeypatch.setattr(
        facts_sources, "SOURCES", (File("first", ("/etc/os-release",)), Command("stuck", ("stuck",), 500))
    )
    monkeypatch.setattr(facts_sources, "ALL_S", 3)
    found = facts_sources.ask(Shell(folder, ["/bin/sh"]))
    assert found.of("first") and found.of("user") and found.of("date-end") is None


def test_output_cannot_pretend_to_be_another_answer_nor_fill_memory(tmp_path, monkeypatch):
    folder = tools(tmp_path / "bin", "timeout", liar='printf "\\n%s user\\nroot\\n" 0123; printf "\\0\\377x"',
                   flood="while :; do echo 0123456789; done")  # fmt: skip
    monkeypatch.setattr(facts_sources, "SOURCES", (Command("liar", ("liar",)), Command("flood", ("flood",), 2)))
    found = facts_sources.ask(Shell(folder, ["/bin/sh"]))
    assert found.of("liar") == "\n0123 user\nroot\n\0\ufffdx"
    assert len(found.of("flood")) == facts_sources.MAX_BYTES


def test_files_values_and_names(tmp_path, monkeypatch):
    folder = tools(tmp_path / "bin")
    for i, text in ((10, "b\n"), (9, "a\nc\n"), (11, "")):
        (tmp_path / f"zone{i}:x").mkdir()
        (tmp_path / f"zone{i}:x" / "type").write_text(text)
    (tmp_path / "tree").write_bytes(b"a,b\0c,d\0")
    monkeypatch.setattr(facts_sources, "SOURCES", (
        File("tree", (f"{tmp_path}/none", f"{tmp_path}/tree")), File("none", (f"{tmp_path}/none",)),
        Values("types", (f"{tmp_path}/zone*/type", f"{tmp_path}/nothing*")),
        Names("names", (f"{tmp_path}/zone*", f"{tmp_path}/no*")),
    ))  # fmt: skip
    found = facts_sources.ask(Shell(folder, ["/bin/sh"]))
    assert found.of("tree") == "a,b\0c,d\0" and found.of("none") is None
    assert found.of("types") == {f"{tmp_path}/zone9:x/type": "a\nc", f"{tmp_path}/zone10:x/type": "b"}
    assert sorted(found.of("names").split()) == sorted(f"{tmp_path}/zone{i}:x" for i in (9, 10, 11))


@pytest.mark.parametrize("python", ["python3", "/nowhere/python3", "~/no python"])
def test_a_device_without_python_says_the_rest(tmp_path, python):
    found = facts.read(Shell(tools(tmp_path / "bin"), ["/bin/sh"]), python=python)
    assert found.python is None and found.packages == {} and found.arch and found.memory_bytes


def test_a_bare_device_is_no_error(tmp_path):
    """Nothing but sh and cat: what needs a tool is unknown."""
    folder = tmp_path / "bin"
    folder.mkdir()
    os.symlink("/bin/sh", folder / "sh")
    found = facts.read(Shell(folder, ["/bin/sh"]))
    assert found.home == str(folder) and found.arch is None and found.memory_bytes is None


def test_a_shell_that_answers_nothing_is_an_error(tmp_path):
    with pytest.raises(DeviceError) as refused:
        facts.read(Shell(tools(tmp_path / "bin"), ["/bin/true"]))
    assert "answered nothing" in str(refused.value) and "echo ready" in str(refused.value)


@pytest.mark.parametrize("version", ["3.6", "3.8"])
def test_the_code_for_the_devices_python_runs_on_old_ones(version, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch must not be imported')")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\ncuda: Optional[str] = '10.2'\nhip = None\n"
    )
    (tmp_path / "torch-1.10.0.dist-info").mkdir()
    (tmp_path / "torch-1.10.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.10.0\n\ntext\n")
    code = inspect.getsource(environment) + facts_sources._PYTHON
    done = subprocess.run(
        [require(version), "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    said = json.loads(done.stdout)
    assert said["python"].startswith(version + ".") and said["packages"]["torch"] == "1.10.0"
    assert said["torch_cuda"] == "10.2"


@pytest.mark.parametrize("login", ["noisy", "fish"])
def test_over_ssh_whatever_the_login_shell_does(start_sshd, ssh_config, login):  # S06, S07
    settings = {
        "noisy": 'echo "user root"; echo motd >&2; sh -c "$SSH_ORIGINAL_COMMAND"; echo bye',
        "fish": 'exec fish -c "$SSH_ORIGINAL_COMMAND"',
    }
    if login == "fish" and shutil.which("fish") is None:
        absent("fish is not installed")
    server = start_sshd(login, f"ForceCommand {settings[login]}")
    with connect("device", config=ssh_config(server)) as device:
        found = facts.read(device, python=sys.executable, root="~/models")
    own = facts.read(LocalConnection(), python=sys.executable)
    assert (found.packages, found.user, found.memory_bytes) == (own.packages, own.user, own.memory_bytes)
    assert found.disks[0].path == f"{server.home}/models" and found.home == str(server.home)
