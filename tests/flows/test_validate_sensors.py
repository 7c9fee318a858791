"""Validate with sensors: recorded trees of a board under a real runner, and the command with its options."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import zipfile

import pytest

from edgeopt.device.runner import Sensors
from edgeopt.errors import DeviceError
from edgeopt.flows.place import locked
from edgeopt.flows.prepare import prepare_at
from edgeopt.flows.push import push_to
from edgeopt.flows.validate import How, latest_report, validate_at, validate_here
from edgeopt.ports.connect import connect
from edgeopt.report.text import plain
from edgeopt.runtime.zipapp import write_zipapp
from tests.sensor_trees import ORIN_NX, command, plant
from tests.tensorrt_device import install, with_engines
from tests.tiny import tiny_artifact

NO_METRIC = {"torchscript": False, "metrics": {}, "cases": (), "cases_complete": False}


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The root of a board's /sys, and a PATH without this machine's own tegrastats and nvidia-smi."""
    command(tmp_path / "bin", "nvidia-smi", "exit 9\n")
    command(tmp_path / "bin", "tegrastats", "echo 'tegrastats: must be run as root'; exit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return plant(tmp_path / "board", ORIN_NX)


def quick(root, **changes) -> How:
    sensors = Sensors(interval_s=0.02, root=str(root), round_s=0.15, idle_s=0.2)
    return How(python=sys.executable, **{"rounds": 2, "calls": 5, "sensors": sensors, **changes})


def test_a_report_has_power_energy_temperatures_clocks_and_limits_are_judged(tmp_path, board):
    limits = {"power_w": 5.5, "energy_mj": 1e6, "temperature_c": 90.0}
    artifact = tiny_artifact(tmp_path / "a", limits=limits, **NO_METRIC)
    done = validate_here(artifact, quick(board))

    (result,) = done.report.candidates
    assert result.power_w.value == pytest.approx(6, abs=0.01) and result.power_w.rounds == 2
    assert result.peak_power_w == pytest.approx(6) and result.energy_mj.value > 0
    assert result.energy_above_idle_mj.value == pytest.approx(0, abs=1e-3)
    assert result.temperature_c == pytest.approx(47.937)
    assert result.clocks_mhz == {"cpu": 1984, "gpu": 611}
    assert result.p50_ms <= result.p90_ms <= result.p99_ms <= result.max_ms
    assert result.p99_interval_ms[0] <= result.p99_ms <= result.p99_interval_ms[1]
    assert result.fps == pytest.approx(1e3 / result.p50_ms)
    assert result.cold_start_ms == pytest.approx(1e3 * result.load_s + result.first_call_ms)

    found = done.report.conditions
    assert found.idle_power_w.value == pytest.approx(6) and found.power_of == "VDD_IN"
    assert found.clocks_max_mhz == {"cpu": 1984, "gpu": 918} and found.throttling == ()
    assert "must be run as root" in {s.name: s.message for s in found.sources}["tegrastats"]
    checks = {check.name.partition(": ")[2]: check for check in done.report.checks}
    assert [checks[key].verdict for key in ("power_w", "energy_mj", "temperature_c")] == ["fail", "pass", "pass"]
    assert "mean power (95 % interval 6 to 6 W) is 6 W, at most 5.5 W is asked for" in checks["power_w"].evidence
    assert latest_report(artifact.folder) == done.report

    shown = plain(done.report)
    assert "power is VDD_IN" in shown and "6.00 ±0.00" in shown and "gpu 611 of 918 MHz" in shown
    assert "sensors: tegrastats: tegrastats ended with status 1: tegrastats: must be run as root" in shown


def test_a_limit_that_no_sensor_can_tell_is_undecided(tmp_path, board):
    artifact = tiny_artifact(tmp_path / "a", limits={"power_w": 5.0}, **NO_METRIC)
    done = validate_here(artifact, quick(tmp_path / "nothing"))
    (check,) = [c for c in done.report.checks if c.name.endswith("power_w")]
    assert (check.verdict, check.evidence) == ("undecided", "mean power was not measured")
    assert done.report.verdict == "undecided" and "no sensor of this device can be read" in plain(done.report)


def test_a_device_that_throttles_all_the_time_is_said_and_its_times_are_doubtful(tmp_path, board):
    (board / "sys/class/thermal/cooling_device2/cur_state").write_text("1\n")
    artifact = tiny_artifact(tmp_path / "a", **NO_METRIC)
    done = validate_here(artifact, quick(board))
    (result,) = done.report.candidates
    assert result.throttled_rounds == 2
    assert "the device throttled in 2 of 2 rounds: too hot: the CPU is throttled" in result.uncertain
    (one,) = done.report.conditions.throttling
    assert (one.source, one.rounds, one.left_out) == ("cooling", 4, 2)  # two were measured again, in vain
    assert "uncertain: " in done.report.reason
    assert "throttled too hot: the CPU is throttled (cpu-throttle-alert)" in plain(done.report)


def test_a_soak_has_a_series_and_a_drift_and_its_rounds_are_seen_live(tmp_path, board):
    seen, thread = [], []

    def watch(said):
        seen.append(said)
        thread.append(threading.current_thread())

    sensors = Sensors(interval_s=0.02, root=str(board), round_s=0.05, idle_s=0.1)
    artifact = tiny_artifact(tmp_path / "a", **NO_METRIC)
    done = validate_here(artifact, quick(board, duration_s=1.5, sensors=sensors, watch=watch))
    report = done.report
    assert len(report.series) == len(seen) >= 8
    assert [said["round"] for said in seen] == list(range(1, len(seen) + 1))
    assert threading.main_thread() not in thread
    assert all(row.power_w == pytest.approx(6) and row.ms["onnxruntime-fp32"] > 0 for row in report.series)
    assert report.candidates[0].drift_percent.rounds == len(report.series)
    assert "drift %" in plain(report)


def test_an_engine_has_power_while_trtexec_calls_it(tmp_path, board, monkeypatch):
    monkeypatch.setenv("PATH", f"{install(tmp_path / 'jetson')}:{os.environ['PATH']}")
    artifact = with_engines(tmp_path / "a")
    how = quick(board, sensors=Sensors(interval_s=0.02, root=str(board), round_s=1.0, idle_s=0.1))
    with connect(None) as connection, locked(connection, str(tmp_path / "root"), artifact.manifest.name) as place:
        push_to(place, artifact)
        prepare_at(place, artifact, python=sys.executable)
        (result,) = validate_at(place, artifact, how).report.candidates
    assert result.failure is None and result.calls == 10
    assert result.power_w.value == pytest.approx(6) and result.power_w.rounds == 2
    # a second holds far more calls than the five that are timed: the energy is of those that ran
    assert 0 < result.energy_mj.value < 6000 / 5


def older_runner(folder) -> bytes:
    """The packed runner as it was before sensors: it refuses the keys that it does not know."""
    packed = zipfile.ZipFile(write_zipapp(folder))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as old:
        for name in packed.namelist():
            text = packed.read(name)
            if name.endswith("request.py"):
                assert b'"sensors": (dict, type(None)), "progress": (str, type(None)),' in text
                text = text.replace(b'"sensors": (dict, type(None)), "progress": (str, type(None)),', b"")
            old.writestr(name, text)
    return out.getvalue()


def test_an_artifact_whose_runner_is_older_is_measured_without_sensors(tmp_path, board):
    artifact = tiny_artifact(tmp_path / "a", extra={"onboard.pyz": older_runner(tmp_path)}, **NO_METRIC)
    seen = []
    done = validate_here(artifact, quick(board, watch=seen.append))
    assert done.report.candidates[0].p50_ms > 0 and done.report.conditions is None and seen == []
    with pytest.raises(DeviceError, match="unknown key 'sensors'"):  # a soak would end after its first rounds
        validate_here(artifact, quick(board, duration_s=2))


def edgeopt(*argv) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "edgeopt", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


NVPMODEL = """\
state=$0.mode
case $1 in
-q) case $(cat "$state") in 0) echo 'NV Power Mode: MAXN'; echo 0 ;; *) echo 'NV Power Mode: 15W'; echo 1 ;; esac ;;
-p) echo 'POWER_MODEL: ID=0 NAME=MAXN'; echo 'POWER_MODEL: ID=1 NAME=15W' ;;
-m) echo "$2" > "$state" ;;
esac
"""


def test_the_command_measures_power_modes_and_the_choice_is_that_of_the_mode_that_stays(tmp_path, board):
    (command(tmp_path / "bin", "nvpmodel", NVPMODEL).with_name("nvpmodel.mode")).write_text("1")
    artifact = tiny_artifact(tmp_path / "a", **NO_METRIC)
    argv = ["validate", artifact.folder, "--rounds", 1, "--calls", 3, "--interval", 0.05, "--watch"]
    away = edgeopt(*argv, "--power-modes", "MAXN")
    assert away.returncode == 0, away.stderr
    assert "power mode MAXN\nPASS  tiny" in away.stdout and away.stdout.endswith("power mode 15W again\n")
    assert "round 1 of 1:  onnxruntime-fp32" in away.stderr
    assert artifact.selection() is None  # the device does not stay in that mode

    both = edgeopt(*argv, "--power-modes", "maxn,15w", "--json")
    assert both.returncode == 0, both.stderr
    found = json.loads(both.stdout)
    assert found["power_mode"] == "15W"
    assert [report["conditions"]["power_mode"] for report in found["reports"]] == ["MAXN", "15W"]
    assert artifact.selection() is not None
    assert (tmp_path / "bin" / "nvpmodel.mode").read_text() == "1\n"
    assert len(list((artifact.folder / "reports").glob("*-MAXN.json"))) >= 1

    unknown = edgeopt(*argv, "--power-modes", "40W")
    assert unknown.returncode == 2 and "it has MAXN, 15W" in unknown.stderr


@pytest.mark.parametrize("argv, said", [
    (["--duration", "soon"], "is no duration"),
    (["--duration", "0s"], "is no duration"),
    (["--duration", "99d"], "is no duration"),
    (["--jetson-clocks"], "goes with --power-modes"),
    (["--interval", "0"], "--interval"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(argv, said):
    done = edgeopt("validate", "gone.edgeopt", *argv)
    assert done.returncode == 2 and said in done.stderr


def test_a_soak_by_the_command(tmp_path):
    artifact = tiny_artifact(tmp_path / "a", **NO_METRIC)
    done = edgeopt("validate", artifact.folder, "--calls", 2, "--duration", "1s", "--no-sensors", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["conditions"] is None and report["candidates"][0]["calls"] >= 4
