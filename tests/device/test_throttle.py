"""What slowed a device down: each kind of evidence, its words, and what is no evidence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeopt.device import nvidia_smi
from edgeopt.device.readings import Readings, Series, read
from edgeopt.device.throttle import events

WINDOW = {"a": [(1.0, 4.0)]}


def column(kind: str, name: str, most=None) -> dict:
    return {"kind": kind, "name": name, "file": "/sys/x", "max": most}


def causes(columns, rows, windows=WINDOW, *, lines=None, turbo=False) -> list[tuple[str, str, tuple]]:
    lines = {"sysfs": [[float(at), row] for at, row in enumerate(rows)], **(lines or {})}
    return [(e.source, e.cause, e.at_s) for e in events(read(columns, lines), windows, turbo=turbo)]


def test_a_quiet_device_has_no_cause():
    columns = [column("cooling", "cpu-throttle-alert", 1), column("over_current", "oc1"), column("current_alarm", "A")]
    assert causes(columns, ["0 7 0"] * 6) == [] and causes([], []) == []


KINDS = {
    "alert": (("cooling", "gpu-throttle-alert", 1), "0 0 1 1 0", "cooling", "too hot: the GPU is throttled", (2, 3)),
    "surface": (("cooling", "hot-surface-alert", 1), "0 1 0 0 0", "cooling", "surface of the case", (1,)),
    "governor": (
        ("cooling", "thermal-cpufreq-0", 9), "0 2 5 0 0", "cooling",
        "the kernel caps the clock (thermal-cpufreq-0, state 5 of 9)", (1, 2),
    ),
    "under-voltage": (("over_current", "oc1"), "7 7 9 9 9", "over-current", "supply is too weak; 2 events", (2,)),
    "average": (("over_current", "oc2"), "0 1 1 1 2", "over-current", "over-current (average)", (1, 4)),
    "instantaneous": (("over_current", "oc3"), "0 0 0 0 1", "over-current", "over-current (instantaneous)", (4,)),
    "another": (("over_current", "oc5"), "0 0 0 0 1", "over-current", "over-current event oc5", (4,)),
    "alarm": (("current_alarm", "VDD_IN"), "0 0 0 1 0", "current alarm", "rail VDD_IN is above", (3,)),
}  # fmt: skip


@pytest.mark.parametrize("of, values, source, words, at_s", KINDS.values(), ids=KINDS)
def test_each_kind_of_evidence(of, values, source, words, at_s):
    ((found_source, cause, found_at),) = causes([column(*of)], values.split())
    assert found_source == source and words in cause and found_at == at_s


def test_the_strongest_evidence_comes_first():
    columns = [column("current_alarm", "A"), column("over_current", "oc1"), column("cooling", "cpu-throttle-alert", 1)]
    found = causes(columns, ["0 0 0", "1 1 1", "0 1 0"])
    assert [source for source, *_ in found] == ["cooling", "over-current", "current alarm"]


def gpu(load: int, mhz: int, rows: int = 6):
    columns = [column("gpu_hz", "17000000.ga10b", 918_000_000), column("gpu_load", "gpu", 1000)]
    return columns, [f"{mhz}000000 {load}"] * rows


def test_a_clock_below_its_largest_counts_only_while_its_processor_is_busy():
    ((source, cause, at_s),) = causes(*gpu(950, 611))
    assert (source, cause, at_s) == ("gpu clock", "GPU clock 611 of 918 MHz while it was busy", (2.5,))
    assert causes(*gpu(300, 611)) == [] and causes(*gpu(950, 900)) == []


@pytest.mark.parametrize("ticks, turbo, found", [(100, False, 1), (20, False, 0), (100, True, 0)])
def test_a_cpu_is_judged_where_its_process_keeps_a_core_busy_and_its_clock_is_no_turbo(ticks, turbo, found):
    columns = [column("cpu_khz", "cpu0", 2_000_000), column("cpu_khz", "cpu4", 2_000_000)]
    lines = {"processes": [[float(at), f"a {at * ticks} 1048576"] for at in range(6)]}
    of = causes(columns, ["1200000 1300000"] * 6, lines=lines, turbo=turbo)
    assert [cause for _, cause, _ in of] == ["CPU clock 1300 of 2000 MHz while it was busy"] * found


def test_the_reasons_of_a_gpus_driver():
    line = "0, 71.50, 87, 1200, 1980, 1024, 99, 0x0000000000000024"
    assert nvidia_smi.parse(line).throttling == (
        "too hot: the driver lowered the clock", "its power limit is reached",
    )  # fmt: skip
    found = causes([], [], lines={"nvidia-smi": [[2.0, line], [3.0, line.replace("24", "01")]]})
    assert [(source, at_s) for source, _, at_s in found] == [("driver", (2.0,))] * 2


def test_nvidia_smi_of_a_gpu_that_tells_little_and_what_is_no_line_of_it():
    found = nvidia_smi.parse("1, [N/A], 35, [Not Supported], [N/A], 300, [N/A], [N/A]")
    assert (found.gpu, found.watts, found.temperature_c, found.memory_mb) == (1, None, 35, 300)
    for text in ("", "No devices were found", 'Field "x" is not a valid field to query.', "a,b,c,d,e,f,g,h"):
        assert nvidia_smi.parse(text) is None


def test_values_that_cannot_be_read_are_left_out_and_not_zero():
    columns = [column("zone_mc", "cpu"), column("zone_mc", "cv0"), column("rail_mw", "VDD_IN"), column("rail_mw", "B")]
    found = read(columns, {"sysfs": [[0.0, "45000 -256000 - 5"], [1.0, "46500 - 3000 5"], [2.0, "47000"]]})
    assert found.temperatures == {"cpu": Series((0.0, 1.0, 2.0), (45.0, 46.5, 47.0))}
    (meter,) = found.power.meters
    assert (meter.of, meter.at_s.tolist(), meter.watts.tolist()) == ("VDD_IN", [1.0], [3.0])


def test_a_moment_at_which_one_rail_could_not_be_read_is_no_sum():
    columns = [column("rail_mv", "CPU"), column("rail_ma", "CPU"), column("rail_mv", "GPU"), column("rail_ma", "GPU")]
    found = read(columns, {"sysfs": [[0.0, "5000 100 5000 200"], [1.0, "5000 100 - 200"], [2.0, "5000 120 5000 200"]]})
    (meter,) = found.power.meters
    assert meter.watts.tolist() == pytest.approx([1.5, 1.6]) and meter.of == "sum of CPU, GPU"


KIND = st.sampled_from(
    ["rail_mv", "rail_ma", "rail_mw", "current_alarm", "zone_mc", "cooling", "over_current", "gpu_hz", "gpu_load",
     "cpu_khz", "energy_uj"]
)  # fmt: skip
COLUMNS = st.lists(
    st.builds(column, KIND, st.sampled_from(["VDD_IN", "cpu", "intel-rapl:0 package-0"]), st.sampled_from([None, 9]))
)
LINES = st.lists(st.one_of(st.text(max_size=30), st.text(alphabet="0123456789- \u0663", max_size=30)), max_size=8)


@given(COLUMNS, LINES, LINES, LINES, LINES)
def test_whatever_was_sampled_is_readings_and_no_exception(columns, files, tegra, smi, processes):
    names = {"sysfs": files, "tegrastats": tegra, "nvidia-smi": smi, "processes": processes}
    lines = {name: [[float(at), text] for at, text in enumerate(of)] for name, of in names.items()}
    found = read(columns, lines)
    assert isinstance(found, Readings)
    events(found, WINDOW)
    found.power.joules(0.5, 1.5), found.power.peak(0, 9)
