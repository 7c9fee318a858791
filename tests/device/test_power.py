"""Energy as an integral over spans, counters that overflow, and which rails and zones are the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeopt.device.power import Counter, Meter, Total, counter, rapl_parts, total_mw


def meter(at_s, watts, of="VDD_IN") -> Meter:
    return Meter(of, np.array(at_s, dtype=float), np.array(watts, dtype=float))


def test_the_board_is_its_input_rail_and_else_the_sum_of_its_rails():
    assert total_mw({"VDD_IN": 5000, "VDD_SOC": 900}) == (5000, "VDD_IN")
    assert total_mw({"POM_5V_GPU": 100, "POM_5V_IN": 2500}) == (2500, "POM_5V_IN")
    assert total_mw({"GPU": 100, "CPU": 311, "NC": 50}) == (411, "sum of GPU, CPU")
    assert total_mw({"VDD_GPU": 7}) == (7, "VDD_GPU")
    assert total_mw({}) is total_mw({"NC": 3}) is None


def test_energy_is_the_integral_between_samples_and_up_to_the_ends_of_the_span():
    ramp = meter([0, 1, 2, 3, 4], [0, 10, 20, 30, 40])
    assert ramp.joules(1, 3) == pytest.approx(40)
    assert ramp.joules(1.5, 1.75) == pytest.approx(0.25 * 16.25)  # no sample of its own: between two of them
    assert ramp.peak(0.5, 2.5) == 20 and ramp.peak(1.1, 1.9) is None
    assert Total([ramp]).watts(1, 3) == pytest.approx(20)


@pytest.mark.parametrize("span", [(8, 9), (3.9, 8), (-9, -8), (2, 2), (3, 1)])
def test_where_samples_do_not_reach_there_is_no_figure(span):
    assert meter([0, 1, 2, 3, 4], [5] * 5).joules(*span) is None
    assert Counter("x", np.arange(5.0), np.arange(5.0)).joules(*span) is None
    assert Total([meter([0, 1, 2, 3, 4], [5] * 5)]).watts(*span) is None


def test_a_sampler_that_stopped_in_between_gives_no_figure():
    assert meter([0, 1, 2, 3, 20, 21], [5] * 6).joules(6, 17) is None


def test_no_meter_and_a_meter_of_one_sample_give_no_figure():
    assert Total(()).joules(0, 1) is None and Total(()).peak(0, 1) is None and Total(()).of == ""
    assert meter([1], [5]).joules(0, 2) is None and meter([], []).joules(0, 2) is None


def test_several_meters_are_added_and_one_that_lacks_makes_no_sum():
    both = Total([meter([0, 1, 2], [5, 5, 5]), meter([0, 1, 2], [1, 2, 3], of="GPU 0 (driver)")])
    assert both.joules(0, 2) == pytest.approx(14) and both.peak(0, 2) == 8
    assert both.of == "VDD_IN + GPU 0 (driver)"
    assert Total([*both.meters, meter([], [])]).joules(0, 2) is None


def test_a_counter_that_overflows_goes_on():
    found = counter("package-0", [0, 1, 2, 3], [990, 999, 4, 10], wraps_at=999)
    assert found.counted.tolist() == pytest.approx([0, 9e-6, 14e-6, 20e-6])
    assert found.joules(0, 3) == pytest.approx(20e-6) and found.peak(0, 3) == pytest.approx(9e-6)
    unknown = counter("package-0", [0, 1, 2], [990, 4, 10], wraps_at=None)
    assert unknown.counted.tolist() == pytest.approx([0, 0, 6e-6])


def test_no_zone_of_rapl_is_counted_twice():
    zones = ["intel-rapl:0 package-0", "intel-rapl:0:0 core", "intel-rapl:0:1 dram", "intel-rapl-mmio:0 package-0"]
    assert rapl_parts(zones) == ["intel-rapl:0 package-0", "intel-rapl:0:1 dram"]
    assert rapl_parts([*zones, "intel-rapl:1 psys"]) == ["intel-rapl:1 psys"]
    assert rapl_parts(["intel-rapl:0:0 core"]) == []


WATTS = st.lists(st.floats(0, 1000), min_size=8, max_size=40)


@given(WATTS, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_energy_of_two_parts_is_that_of_the_whole(watts, a, b, c):
    of = meter(np.arange(len(watts)), watts)
    low, middle, high = sorted(x * (len(watts) - 1) for x in (a, b, c))
    parts = [of.joules(low, middle), of.joules(middle, high)]
    if None not in parts:
        assert sum(parts) == pytest.approx(of.joules(low, high), abs=1e-6)
        assert min(watts) - 1e-6 <= of.joules(low, high) / (high - low) <= max(watts) + 1e-6


@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=30), st.integers(0, 10**6))
def test_a_counter_counts_the_steps_however_often_it_overflows(steps, start):
    wraps_at = 10**6
    raw = [(start + sum(steps[:i])) % (wraps_at + 1) for i in range(len(steps) + 1)]
    found = counter("x", range(len(raw)), raw, wraps_at)
    assert found.counted[-1] == pytest.approx(sum(steps) / 1e6, abs=1e-9)
