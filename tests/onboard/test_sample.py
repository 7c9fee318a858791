"""The sampler on recorded trees and with commands that stand in for NVIDIA's, in a runner of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from edgeopt.onboard import sysfs
from edgeopt.onboard.sample import Sampler
from edgeopt.runtime.zipapp import write_zipapp
from tests.conftest import wait_until
from tests.onboard.asking import MEASURE, ask, request_of
from tests.pythons import require
from tests.sensor_trees import DESKTOP, NANO, ORIN_NX, RAIL, command, plant
from tests.tiny import tiny_artifact

QUICK = {"interval_s": 0.02, "round_s": 0.1, "idle_s": 0.1}
TEGRASTATS = 'echo $$ >> "$0.pids"\nwhile echo "RAM 1/2MB VDD_IN 5000mW/5000mW tj@48C"; do sleep 0.05; done\n'


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("artifact"), torchscript=False)


@pytest.fixture
def bin_only(tmp_path, monkeypatch):
    """A folder of commands that is first on the PATH, and hides this machine's own sensors."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command(tmp_path / "bin", "nvidia-smi", "exit 9\n")
    return tmp_path / "bin"


def kinds(columns: list[dict]) -> list[tuple[str, str]]:
    return [(column["kind"], column["name"]) for column in columns]


def test_a_board_of_jetpack_5(tmp_path):
    columns, refused = sysfs.find(str(plant(tmp_path, ORIN_NX)))
    assert refused == {}
    assert kinds(columns) == [
        ("rail_mv", "VDD_IN"), ("rail_ma", "VDD_IN"), ("current_alarm", "VDD_IN"),
        ("rail_mv", "VDD_CPU_GPU_CV"), ("rail_ma", "VDD_CPU_GPU_CV"), ("rail_mv", "VDD_SOC"), ("rail_ma", "VDD_SOC"),
        ("zone_mc", "cpu-thermal"), ("zone_mc", "cv0-thermal"), ("cooling", "cpu-throttle-alert"),
        ("over_current", "oc1"), ("over_current", "oc3"), ("gpu_hz", "17000000.ga10b"), ("gpu_load", "gpu"),
        ("cpu_khz", "cpu0"),
    ]  # fmt: skip
    assert {c["name"]: c["max"] for c in columns if c["max"]} == {
        "cpu-throttle-alert": 1, "17000000.ga10b": 918000000, "gpu": 1000, "cpu0": 1984000,
    }  # fmt: skip
    reader = sysfs.Reader(columns)
    try:
        assert reader.line().startswith("5000 1200 0 5000 300 5000 200 47937 -256000 0 7 2 611000000 320")
        (tmp_path / RAIL / "curr1_input").write_text("1300\n")
        (tmp_path / RAIL / "curr2_input").write_text("")
        assert reader.line().startswith("5000 1300 0 5000 - 5000 200")  # read anew, and one that gives nothing
    finally:
        reader.close()


def test_a_board_of_jetpack_4_a_desktop_and_a_machine_without_sensors(tmp_path):
    assert kinds(sysfs.find(str(plant(tmp_path / "nano", NANO)))[0]) == [
        ("rail_mw", "POM_5V_IN"), ("rail_mw", "POM_5V_GPU"),
    ]  # fmt: skip
    columns, _ = sysfs.find(str(plant(tmp_path / "pc", DESKTOP)))
    assert kinds(columns) == [
        ("cooling", "Processor"), ("energy_uj", "intel-rapl:0 package-0"), ("energy_uj", "intel-rapl:0:0 core"),
    ]  # fmt: skip
    assert columns[1]["max"] == 262143328850
    assert sysfs.find(str(tmp_path / "none")) == ([], {})


def test_a_file_that_cannot_be_opened_or_read_is_said_and_no_column(tmp_path):
    root = plant(tmp_path, DESKTOP)
    path = root / "sys/class/powercap/intel-rapl:0/energy_uj"
    path.unlink()
    path.symlink_to(path)  # for root no mode keeps a file from being opened
    columns, refused = sysfs.find(str(root))
    assert "intel-rapl:0 package-0" not in [c["name"] for c in columns]
    assert refused == {str(path): "Too many levels of symbolic links"}
    path.unlink()
    path.mkdir()  # opens, and reading it fails
    columns, refused = sysfs.find(str(root))
    reader = sysfs.Reader(columns)
    assert reader.line() == "0 - 1" and refused == {}
    reader.close()


ALERT = {"kind": "cooling", "name": "cpu-throttle-alert"}
COUNTER = {"kind": "over_current", "name": "oc1"}


@pytest.mark.parametrize("columns, lines, found", [
    ([ALERT], ["0", "0", "1", "0"], ["cooling cpu-throttle-alert"]),
    ([ALERT], ["1", "0", "0", "1"], []),
    ([ALERT], ["0", "-", "-", "0"], []),
    ([COUNTER], ["7", "7", "8", "9"], ["over_current oc1"]),
    ([COUNTER], ["7", "8", "8", "9"], ["over_current oc1"]),  # between the sample before and the first inside
    ([COUNTER], ["7", "7", "7", "9"], []),
    ([COUNTER], ["-", "-", "-", "-"], []),
    ([COUNTER, ALERT], ["7 0", "7 1", "9 0", "9 0"], ["over_current oc1", "cooling cpu-throttle-alert"]),
])  # fmt: skip
def test_what_slowed_the_device_down_within_a_span(columns, lines, found):
    assert sysfs.throttled(columns, [[at, line] for at, line in enumerate(lines)], 0.5, 2.5) == found


def test_samples_fall_into_the_calls_of_their_candidate(artifact, tmp_path, bin_only):
    command(bin_only, "tegrastats", TEGRASTATS)
    command(bin_only, "nvpmodel", "echo 'NV Power Mode: MAXN'; echo 0\n")
    root = str(plant(tmp_path / "root", ORIN_NX))
    request = request_of(artifact, tmp_path / "out", measure=MEASURE, sensors=dict(QUICK, root=root))
    response = ask(artifact, request, tmp_path)

    sensors, result = response["sensors"], response["candidates"]["onnxruntime-fp32"]
    assert {s["name"]: s["status"] for s in sensors["sources"]} == {
        "sysfs": "ok", "tegrastats": "ok", "nvidia-smi": "failed",
    }  # fmt: skip
    assert len(result["windows"]) == len(result["rounds_s"]) == 3
    for (since, until, calls), calls_s in zip(result["windows"], result["rounds_s"], strict=True):
        assert until - since >= 0.1 and calls >= len(calls_s) == 20 and sum(calls_s) <= until - since
        assert sum(since <= at <= until for at, _ in sensors["lines"]["sysfs"]) >= 2
    spans = [(r["started_s"], r["ended_s"]) for r in sensors["rounds"] if r["counts"]]
    for (since, until, _), (started, ended) in zip(result["windows"], spans, strict=True):
        assert started <= since < until <= ended
    times = [at for at, _ in sensors["lines"]["sysfs"]]
    assert times == sorted(times) and times[0] >= sensors["started_s"]
    assert sensors["idle_s"][1] - sensors["idle_s"][0] >= 0.1 and sensors["idle_s"][1] <= spans[0][0]
    name, ticks, held = sensors["lines"]["processes"][-1][1].split()
    assert name == "onnxruntime-fp32" and int(ticks) > 0 and int(held) > 20 << 20
    assert sensors["lines"]["tegrastats"][0][1].startswith("RAM 1/2MB VDD_IN 5000mW/5000mW")
    assert sensors["power_mode"].split("\n")[:2] == ["NV Power Mode: MAXN", "0"]
    assert sensors["cpu_s"] >= 0
    for pid in (bin_only / "tegrastats.pids").read_text().split():
        assert not os.path.exists(f"/proc/{pid}"), "tegrastats outlived the runner"


def test_without_power_no_round_is_longer_and_nobody_waits(artifact, tmp_path, bin_only):
    request = request_of(
        artifact, tmp_path / "out", measure=MEASURE, sensors={"root": str(tmp_path / "none"), "round_s": 3600}
    )
    response = ask(artifact, request, tmp_path)
    assert response["sensors"]["idle_s"] is None and response["sensors"]["columns"] == []
    assert [w[2] for w in response["candidates"]["onnxruntime-fp32"]["windows"]] == [20, 20, 20]


def test_a_request_without_sensors_has_the_answer_that_it_always_had(artifact, tmp_path):
    response = ask(artifact, request_of(artifact, tmp_path / "out", measure=MEASURE), tmp_path)
    assert "sensors" not in response
    assert not {"windows", "gpu_bytes"} & set(response["candidates"]["onnxruntime-fp32"])


FAILING = {
    "needs root": ("echo 'tegrastats: must be run as root'; exit 1\n", "ended with status 1: tegrastats: must be run"),
    "no newline": ("printf 'no such option --interval' >&2; exit 2\n", "ended with status 2: no such option"),
    "silent": ("exec sleep 600\n", "tegrastats printed nothing"),
    "ignores its end": ("trap '' TERM HUP INT\nwhile :; do sleep 0.1; done\n", "tegrastats printed nothing"),
    "killed": ("kill -9 $$\n", "ended with status -9"),
}


@pytest.mark.parametrize("text, message", FAILING.values(), ids=FAILING)
def test_a_tegrastats_that_fails_is_said_and_nothing_hangs(text, message, tmp_path, bin_only, monkeypatch):
    monkeypatch.setattr("edgeopt.onboard.sample._FIRST_LINE_S", 0.3)
    command(bin_only, "tegrastats", text)
    sampler = Sampler(dict(QUICK, root=str(tmp_path / "none")))
    sampler.start()
    assert not sampler.has_power()
    (source,) = [s for s in sampler.stop()["sources"] if s["name"] == "tegrastats"]
    assert source["status"] == "failed" and message in source["message"]


def test_where_there_is_no_tegrastats_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    sampler = Sampler(dict(QUICK, root=str(tmp_path / "none")))
    sampler.start()
    found = {s["name"]: (s["status"], s["message"]) for s in sampler.stop()["sources"]}
    assert found["tegrastats"] == ("missing", "'tegrastats' is not on the PATH")
    assert found["sysfs"][0] == "missing"


def test_sudo_is_used_only_where_it_is_asked_for(tmp_path, bin_only, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command(bin_only, "sudo", 'echo "sudo $*"; exec sleep 600\n')
    command(bin_only, "tegrastats", "echo plain; exec sleep 600\n")
    for asked, said in ((0, "plain"), (1, f"sudo -n {bin_only / 'tegrastats'} --interval 100")):
        sampler = Sampler(dict(QUICK, sudo=asked, root=str(tmp_path / "none")))
        sampler.start()
        assert sampler.stop()["lines"]["tegrastats"][0][1] == said


def test_tegrastats_ends_with_a_runner_that_is_killed(artifact, tmp_path, bin_only):
    command(bin_only, "tegrastats", TEGRASTATS)
    request = request_of(
        artifact, tmp_path / "out", sensors=dict(QUICK, root=str(tmp_path / "none"), round_s=600),
        measure={**MEASURE, "max_s": 3600, "lock": str(tmp_path / "lock")},
    )  # fmt: skip
    (tmp_path / "out").mkdir()
    (tmp_path / "request.json").write_text(json.dumps(request))
    argv = [sys.executable, str(artifact.folder / "onboard.pyz"), "run", str(tmp_path / "request.json")]
    runner = subprocess.Popen([*argv, str(tmp_path / "response.json")])
    try:
        pids = bin_only / "tegrastats.pids"
        assert wait_until(lambda: pids.exists() and pids.read_text().strip())
        runner.send_signal(signal.SIGKILL)
        runner.wait()
        pid = pids.read_text().strip()
        assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    finally:
        runner.kill()
        runner.wait()


def test_a_round_in_which_the_device_throttled_is_measured_again(artifact, tmp_path, bin_only):
    root = plant(tmp_path / "root", ORIN_NX)
    state = root / "sys/class/thermal/cooling_device2/cur_state"
    # the candidate's own first calls are hot: an op library would not run in onnxruntime, so the test plays the heat
    state.write_text("1\n")
    request = request_of(
        artifact, tmp_path / "out", progress="stdout", sensors=dict(QUICK, root=str(root)),
        measure={**MEASURE, "repeats": 2, "lock": str(tmp_path / "lock")},
    )  # fmt: skip
    (tmp_path / "out").mkdir()
    (tmp_path / "request.json").write_text(json.dumps(request))
    argv = [sys.executable, str(artifact.folder / "onboard.pyz"), "run", str(tmp_path / "request.json")]
    with subprocess.Popen([*argv, str(tmp_path / "response.json")], stdout=subprocess.PIPE, text=True) as runner:
        first = json.loads(runner.stdout.readline())
        state.write_text("0\n")
        rest = [json.loads(line) for line in runner.stdout]
    assert (first["round"], first["of"], first["throttled"]) == (1, 3, ["cooling cpu-throttle-alert"])
    assert first["ms"]["onnxruntime-fp32"] > 0 and first["lines"]["sysfs"][1].startswith("5000 1200")
    assert rest[-1]["throttled"] == []
    rounds = json.loads((tmp_path / "response.json").read_text())["sensors"]["rounds"]
    assert len(rounds) > 3 and rounds[0]["throttled"] and not rounds[0]["counts"]
    assert sum(r["counts"] for r in rounds) == 3


def test_a_soak_goes_on_for_its_time_and_every_round_counts(artifact, tmp_path, bin_only):
    measure = {**MEASURE, "rounds": 1, "calls": 2, "duration_s": 0.5}
    request = request_of(artifact, tmp_path / "out", measure=measure, sensors=dict(QUICK, root=str(tmp_path / "none")))
    started = time.perf_counter()
    response = ask(artifact, request, tmp_path)
    assert time.perf_counter() - started >= 0.5
    rounds = response["sensors"]["rounds"]
    assert len(rounds) > 3 and all(r["counts"] for r in rounds)
    assert rounds[-1]["ended_s"] - rounds[0]["started_s"] >= 0.5
    assert len(response["candidates"]["onnxruntime-fp32"]["rounds_s"]) == len(rounds)


@pytest.mark.parametrize("version", ["3.6", "3.8"])
def test_the_pythons_of_old_boards_sample_alike(version, tmp_path, bin_only):
    command(bin_only, "tegrastats", TEGRASTATS)
    code = (
        "import json, sys, time\nsys.path[0] = sys.argv[2]\nfrom onboard.sample import Sampler\n"
        "sampler = Sampler(json.loads(sys.argv[1]), {'me': __import__('os').getpid()})\nsampler.start()\n"
        "time.sleep(0.2)\nprint(json.dumps(sampler.stop()))"
    )
    plant(tmp_path / "root", NANO)
    settings = json.dumps(dict(QUICK, root=str(tmp_path / "root")))
    argv = [require(version), "-c", code, settings, str(write_zipapp(tmp_path))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lines"]["sysfs"][0][1] == "2750 120" and found["lines"]["tegrastats"]
    assert found["lines"]["processes"][0][1].startswith("me ")
