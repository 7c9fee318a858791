"""From samples to a candidate's power and energy, the device's state, and a soak's series."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeopt.device import conditions
from edgeopt.device.runner import Response, Run
from edgeopt.device.throttle import Event

# 5 W idle for a second; then two rounds of 'a' at 9 W and 11 W and one of 'b' at 7 W, a sample each 0.1 s
POWER = [(0.0, 1.0, 5000), (1.0, 3.0, 9000), (3.0, 5.0, 11000), (5.0, 7.0, 7000)]
ROUNDS = [(1.05, 2.95), (3.05, 4.95), (5.05, 6.95)]


def milliwatts(at: float) -> int:
    return next((mw for since, until, mw in POWER if since <= at < until), 7000)


def sampled(**changes) -> dict:
    columns = [
        {"kind": "rail_mw", "name": "VDD_IN", "file": "/sys/a", "max": None},
        {"kind": "zone_mc", "name": "cpu", "file": "/sys/b", "max": None},
        {"kind": "cooling", "name": "cpu-throttle-alert", "file": "/sys/c", "max": 1},
    ]
    times = [round(0.1 * i, 3) for i in range(71)]
    rows = [[t, f"{milliwatts(t)} {45000 + int(1000 * t)} {int(4 < t < 4.5)}"] for t in times]
    found = {
        "interval_s": 0.1, "started_s": 0.0, "idle_s": [0.0, 0.9], "cpu_s": 0.01, "columns": columns,
        "sources": [{"name": "sysfs", "status": "ok", "message": ""}],
        "lines": {"sysfs": rows, "processes": [[t, f"a {int(100 * t)} 2097152"] for t in times]},
        "gpu_memory": {"a": 300}, "power_mode": "NV Power Mode: 15W\n1\n",
        "rounds": [
            {"started_s": since, "ended_s": until, "busy": False, "throttled": [], "counts": True}
            for since, until in ROUNDS
        ],
    }  # fmt: skip
    return {**found, **changes}


def run(*windows, **changes) -> Run:
    fields = {
        "status": "ok", "failure": None, "flags": (), "load_s": 0.5, "first_call_s": 0.1, "peak_rss_bytes": 1,
        "outputs": {}, "rounds_s": tuple((0.01, 0.02, 0.03) for _ in windows), "windows": windows,
    }  # fmt: skip
    return Run(**{**fields, **changes})


def response(runs: dict[str, Run], sensors: dict | None, machine: str = "aarch64") -> Response:
    return Response({"machine": machine}, runs, Path(), None, sensors)


A = run((1.1, 2.9, 100), (3.1, 4.9, 100))


def test_energy_is_of_the_calls_of_each_candidate_alone():
    seen = conditions.observe(response({"a": A, "b": run((5.1, 6.9, 200))}, sampled()))
    a = conditions.figures("a", A, seen)
    assert a["power_w"].value == pytest.approx(10) and a["power_w"].rounds == 2
    assert (a["power_w"].low, a["power_w"].high) == pytest.approx((9, 11))
    assert a["energy_mj"].value == pytest.approx(1e3 * 10 * 1.8 / 100)
    assert a["energy_above_idle_mj"].value == pytest.approx(1e3 * 5 * 1.8 / 100)
    assert a["peak_power_w"] == 11 and a["temperature_c"] == pytest.approx(49.9)
    assert a["peak_gpu_mb"] == 300
    b = conditions.figures("b", run((5.1, 6.9, 200)), seen)
    assert b["power_w"].value == pytest.approx(7) and b["energy_mj"].value == pytest.approx(1e3 * 7 * 1.8 / 200)
    assert b["peak_gpu_mb"] is None


def test_the_state_of_the_device():
    found = conditions.conditions(conditions.observe(response({"a": A}, sampled())))
    assert found.power_mode == "15W" and found.power_of == "VDD_IN"
    assert found.idle_power_w.value == pytest.approx(5)
    assert (found.temperatures_start_c, found.temperatures_peak_c) == ({"cpu": 45}, {"cpu": 52})
    assert (found.samples, found.interval_s, found.sources[0].name) == (71, 0.1, "sysfs")


def test_throttling_is_told_with_its_time_and_marks_the_rounds_that_it_fell_into():
    rounds = sampled()["rounds"]
    (one,) = conditions.conditions(conditions.observe(response({"a": A}, sampled()))).throttling
    assert (one.source, one.first_s, one.last_s, one.rounds, one.left_out) == ("cooling", 4.1, 4.4, 1, 0)
    seen = conditions.observe(response({"a": A}, sampled()))
    assert conditions.figures("a", A, seen)["throttled_rounds"] == 1
    words = "the device throttled in 1 of 3 rounds: too hot: the CPU is throttled (cpu-throttle-alert)"
    assert conditions.slowed_down(seen, 1) == words and conditions.slowed_down(seen, 0) is None

    left = [rounds[0], {**rounds[1], "counts": False}, rounds[2]]
    seen = conditions.observe(response({"a": A}, sampled(rounds=left)))
    (one,) = conditions.conditions(seen).throttling
    assert (one.rounds, one.left_out) == (1, 1)
    assert conditions.slowed_down(seen, 1) is None  # what was left out casts no doubt


def test_without_sensors_or_without_power_there_are_no_such_figures():
    assert conditions.observe(response({"a": A}, None)) is None
    assert conditions.figures("a", A, None) == {} and conditions.conditions(None) is None
    assert conditions.series(response({"a": A}, None), None) == ()
    dark = sampled(columns=[], lines={}, idle_s=None, power_mode=None, gpu_memory={})
    seen = conditions.observe(response({"a": A}, dark))
    found = conditions.figures("a", A, seen)
    assert found["power_w"] is found["energy_mj"] is found["energy_above_idle_mj"] is found["temperature_c"] is None
    assert conditions.conditions(seen).power_of is conditions.conditions(seen).power_mode is None


def test_a_runtime_whose_calls_have_no_window_has_no_power_and_says_no_wrong_one():
    timed_elsewhere = run(None, None, rounds_s=((0.01,), (0.01,)))
    seen = conditions.observe(response({"a": timed_elsewhere}, sampled()))
    found = conditions.figures("a", timed_elsewhere, seen)
    assert found["power_w"] is found["energy_mj"] is None
    assert found["temperature_c"] == pytest.approx(51.9) and found["throttled_rounds"] == 1


def test_memory_of_a_runtimes_own_allocator_comes_before_the_drivers():
    seen = conditions.observe(response({"a": A}, sampled()))
    assert conditions.figures("a", run((1.1, 2.9, 1), gpu_bytes=64 << 20), seen)["peak_gpu_mb"] == 64


def test_a_clock_below_its_largest_is_evidence_on_a_board_and_none_on_a_pc(monkeypatch):
    asked = []
    monkeypatch.setattr(
        conditions.throttle, "events", lambda readings, windows, turbo: asked.append(turbo) or [Event("x", "y", (2.0,))]
    )
    for machine in ("aarch64", "x86_64"):
        conditions.observe(response({"a": A}, sampled(), machine))
    assert asked == [False, True]


def test_a_soak_is_a_row_a_round_and_its_drift():
    rounds_s = tuple((0.010 if i < 4 else 0.012,) for i in range(16))
    windows = tuple((0.4 * i + 0.1, 0.4 * i + 0.4, 1) for i in range(16))
    spans = [{"started_s": a, "ended_s": b, "busy": False, "throttled": [], "counts": True} for a, b, _ in windows]
    soaked = run(*windows, rounds_s=rounds_s)
    of = response({"a": soaked}, sampled(rounds=spans))
    rows = conditions.series(of, conditions.observe(of))
    assert len(rows) == 16 and rows[0].ms == {"a": 10} and rows[15].ms == {"a": 12}
    assert (rows[0].at_s, rows[0].power_w, rows[0].rss_mb) == (0.1, pytest.approx(5), {"a": 2})
    assert rows[-1].temperature_c == pytest.approx(51.4)
    assert [number for number, row in enumerate(rows) if row.throttled] == [10]
    drift = conditions.drift_percent(soaked)
    assert drift.value == pytest.approx(20) and drift.rounds == 16
    assert conditions.drift_percent(run(*windows[:7], rounds_s=rounds_s[:7])) is None
