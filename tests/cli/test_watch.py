"""A runner's lines after each round, understood one after the other."""

from __future__ import annotations

import pytest

from edgeopt.cli import watch
from edgeopt.device.live import Rounds

COLUMNS = [
    {"kind": "energy_uj", "name": "intel-rapl:0 package-0", "file": "/sys/a", "max": 10**9},
    {"kind": "zone_mc", "name": "cpu", "file": "/sys/b", "max": None},
]


def said(number: int, line: str, **changes) -> dict:
    found = {
        "round": number, "of": 3, "at_s": 1.5 * number, "duration_s": None, "ms": {"a": 2.5, "b": 3.0}, "busy": False,
        "throttled": [], "columns": COLUMNS, "lines": {"sysfs": [1.5 * number, line]},
    }  # fmt: skip
    return {**found, **changes}


def test_a_counter_takes_two_lines_and_a_meter_one():
    rounds = Rounds()
    assert rounds.understand(said(1, "1000000 45000")).power_w is None
    second = rounds.understand(said(2, "16000000 46000"))
    assert second.power_w == pytest.approx(10) and second.temperature_c == 46
    lines = {"tegrastats": [3.0, "VDD_IN 5297/5297 GR3D_FREQ 62%@306"]}
    meter = Rounds().understand(said(1, "", columns=[], lines=lines))
    assert meter.power_w == pytest.approx(5.297) and meter.clocks_mhz == {"gpu": 306}


def test_what_is_no_round_is_none():
    for other in ({}, [], "x", 3, None, {"library": "said"}):
        assert Rounds().understand(other) is None


def test_a_round_as_a_line_and_as_a_table():
    rounds = Rounds()
    first = rounds.understand(said(1, "1000000 45000"))
    assert watch.line(first) == "round 1 of 3:  a 2.500 ms, b 3.000 ms  45 °C"
    last = rounds.understand(said(4, "46000000 61000", busy=True, throttled=["cooling cpu-throttle-alert"]))
    doubts = "others use the machine  throttled: cooling cpu-throttle-alert"
    assert watch.line(last) == f"round 4, a repeat:  a 2.500 ms, b 3.000 ms  10.0 W  61 °C  {doubts}"
    soak = rounds.understand(said(5, "", of=None, duration_s=1800.0, columns=[], lines={}))
    assert watch.line(soak) == "round 5, 8 of 1800 s:  a 2.500 ms, b 3.000 ms"
    drawn = watch.table([first, last])
    assert [column.header for column in drawn.columns] == ["round", "a", "b", "W", "°C", "MHz", ""]
    assert drawn.row_count == 2 and drawn.title == "round 4, a repeat, p50 in ms"
