"""tegrastats of every release: recorded lines, and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgeopt.device.power import total_mw
from edgeopt.device.tegrastats import Line, parse

# recorded: DataDog/datadog-agent (jetson_test.go), rbonghi/jetson_stats, GDWR/jetson_exporter#14
NANO = "RAM 534/3964MB (lfb 98x4MB) SWAP 5/1982MB (cached 1MB) IRAM 0/252kB(lfb 252kB) CPU [16%@204,9%@204,0%@204,0%@204] EMC_FREQ 0%@204 GR3D_FREQ 0%@76 APE 25 PLL@34C CPU@36.5C PMIC@100C GPU@36C AO@39.5C thermal@36.25C POM_5V_IN 1022/1022 POM_5V_GPU 0/0 POM_5V_CPU 204/204"  # noqa: E501
TX2 = "RAM 2344/7852MB (lfb 1154x4MB) SWAP 0/3926MB (cached 0MB) CPU [1%@345,off,off,1%@345,0%@345,2%@345] EMC_FREQ 4%@1600 GR3D_FREQ 0%@624 APE 150 PLL@37.5C MCPU@37.5C PMIC@100C Tboard@32C GPU@35C BCPU@37.5C thermal@36.5C Tdiode@34.25C VDD_SYS_GPU 152/152 VDD_SYS_SOC 687/687 VDD_4V0_WIFI 0/0 VDD_IN 3056/3056 VDD_SYS_CPU 152/152 VDD_SYS_DDR 883/883"  # noqa: E501
AGX_XAVIER = "RAM 721/31927MB (lfb 7291x4MB) SWAP 0/15963MB (cached 0MB) CPU [2%@1190,0%@1190,0%@1190,0%@1190,off,off,off,off] EMC_FREQ 0%@665 GR3D_FREQ 0%@318 APE 150 MTS fg 0% bg 0% AO@37.5C GPU@37.5C Tdiode@40C PMIC@100C AUX@36C CPU@37.5C thermal@36.9C Tboard@37C GPU 0/0 CPU 311/311 SOC 932/932 CV 0/0 VDDRQ 621/621 SYS5V 1482/1482"  # noqa: E501
XAVIER_NX = "RAM 4412/7772MB (lfb 237x4MB) SWAP 139/3886MB (cached 2MB) CPU [9%@1190,6%@1190,6%@1190,5%@1190,4%@1190,8%@1267] EMC_FREQ 10%@1600 GR3D_FREQ 62%@306 APE 150 MTS fg 0% bg 0% AO@41.5C GPU@43C PMIC@100C AUX@41.5C CPU@43.5C thermal@42.55C VDD_IN 4067/4067 VDD_CPU_GPU_CV 738/738 VDD_SOC 1353/1353"  # noqa: E501
ORIN_NX = "RAM 6334/15388MB (lfb 1770x4MB) SWAP 491/7694MB (cached 0MB) CPU [6%@729,9%@729,5%@729,16%@729,off,off,off,off] EMC_FREQ 0%@2133 GR3D_FREQ 0%@611 VIC_FREQ 729 APE 174 CV0@45.812C CPU@47.937C SOC2@46.093C SOC0@46.968C CV1@46.406C GPU@45.875C tj@48.875C SOC1@48.875C CV2@45.75C VDD_IN 5299mW/5299mW VDD_CPU_GPU_CV 773mW/773mW VDD_SOC 1424mW/1424mW"  # noqa: E501
AGX_ORIN_DATED = "04-11-2025 10:36:27 RAM 4321/62801MB (lfb 1759x4MB) SWAP 19/31400MB (cached 0MB) CPU [0%@729,0%@729] EMC_FREQ 0%@2133 GR3D_FREQ 0%@[0,0] VIC_FREQ 729 APE 174 CV0@-256C CPU@44.562C Tboard@32C SOC2@40.093C Tdiode@33C SOC0@41.093C CV1@-256C GPU@-256C tj@44.343C SOC1@41.25C CV2@-256C VDD_GPU_SOC 2340mW/2340mW VDD_CPU_CV 390mW/390mW VIN_SYS_5V0 4025mW/4025mW NC 0mW/0mW VDDQ_VDD2_1V8AO 301mW/301mW NC 0mW/0mW"  # noqa: E501
AGX_ORIN_ROOT = "RAM 29114/30697MB (lfb 3x4MB)    SWAP 4915/15348MB (cached 1MB) CPU [3%@729,4%@729,0%@729,1%@729,0%@2201,100%@2201] EMC_FREQ 1%@2133 GR3D_FREQ 0%@[305,305] NVENC      off  NVDEC    off NVJPG off NVJPG1    off         VIC        off          OFA           off          NVDLA0    off       NVDLA1     off          PVA0_FREQ off         APE           174        cpu@53.062C soc2@48.25C soc0@48.843C  gpu@47.812C tj@53.062C soc1@48.968C    VDD_GPU_SOC 3205mW/3205mW VDD_CPU_CV 4405mW/4405mW VIN_SYS_5V0 4767mW/4767mW"  # noqa: E501
AGX_ORIN_USER = "RAM 2448/62840MB (lfb 2x4MB) SWAP 0/31420MB (cached 0MB) CPU [0%@2201,0%@2201] GR3D_FREQ 0% cpu@42C soc2@37.843C soc0@39.187C gpu@37.75C tj@42C soc1@37.937C VDD_GPU_SOC 4940mW/4940mW VDD_CPU_CV 988mW/988mW VIN_SYS_5V0 4442mW/4442mW"  # noqa: E501
AGX_ORIN_39 = "07-25-2026 09:08:28 RAM 20642/62817MB (lfb 1x2MB) CPU [23%@2201,10%@2201] EMC_FREQ 3%@3199 GR3D_FREQ 12%@[1300,1300] NVENC0 off NVDEC0 off NVJPG0 off NVJPG1 off VIC off OFA off NVDLA0 off NVDLA1 off PVA0_FREQ off APE 174 cpu@52.968C/52.968C soc2@48.406C/48.406C soc0@49.531C/49.531C gpu@47.625C/47.625C VDD_GPU_SOC 5139mW/5139mW/5139mW VDD_CPU_CV 3268mW/3268mW/3268mW VIN_SYS_5V0 5500mW/5500mW/5500mW"  # noqa: E501
THOR = "RAM 4722/7844MB (lfb 1x512kB) EMC_FREQ 2%@1866 GR3D_FREQ @[1000,1000,1000] APE 150"
THOR_WITHOUT_GPU = "RAM 4722/125771MB (lfb 1x512kB) CPU [1%@2601,off] cpu@41.5C tj@42C VDD_GPU 1800mW/1700mW VDD_CPU_SOC_MSS 9021mW/9000mW VIN_SYS_5V0 5100mW/5000mW"  # noqa: E501

# line -> RAM, number of cores, (EMC %, MHz), (GPU %, MHz), fastest core, (a temperature), total power and of what
RECORDED = {
    "nano": (NANO, 534, 4, (0, 204), (0, 76), 204, ("CPU", 36.5), (1022, "POM_5V_IN")),
    "tx2": (TX2, 2344, 6, (4, 1600), (0, 624), 345, ("Tdiode", 34.25), (3056, "VDD_IN")),
    "agx xavier": (
        AGX_XAVIER, 721, 8, (0, 665), (0, 318), 1190, ("thermal", 36.9),
        (3346, "sum of GPU, CPU, SOC, CV, VDDRQ, SYS5V"),
    ),
    "xavier nx": (XAVIER_NX, 4412, 6, (10, 1600), (62, 306), 1267, ("GPU", 43), (4067, "VDD_IN")),
    "orin nx": (ORIN_NX, 6334, 8, (0, 2133), (0, 611), 729, ("tj", 48.875), (5299, "VDD_IN")),
    "agx orin, dated": (
        AGX_ORIN_DATED, 4321, 2, (0, 2133), (0, 0), 729, ("Tboard", 32),
        (7056, "sum of VDD_GPU_SOC, VDD_CPU_CV, VIN_SYS_5V0, VDDQ_VDD2_1V8AO"),
    ),
    "agx orin, root": (
        AGX_ORIN_ROOT, 29114, 6, (1, 2133), (0, 305), 2201, ("gpu", 47.812),
        (12377, "sum of VDD_GPU_SOC, VDD_CPU_CV, VIN_SYS_5V0"),
    ),
    "agx orin, no root": (
        AGX_ORIN_USER, 2448, 2, (None, None), (0, None), 2201, ("cpu", 42),
        (10370, "sum of VDD_GPU_SOC, VDD_CPU_CV, VIN_SYS_5V0"),
    ),
    "agx orin, R39": (
        AGX_ORIN_39, 20642, 2, (3, 3199), (12, 1300), 2201, ("soc0", 49.531),
        (13907, "sum of VDD_GPU_SOC, VDD_CPU_CV, VIN_SYS_5V0"),
    ),
    "thor": (THOR, 4722, 0, (2, 1866), (None, 1000), None, None, None),
    "thor without GPU": (
        THOR_WITHOUT_GPU, 4722, 2, (None, None), (None, None), 2601, ("tj", 42),
        (15921, "sum of VDD_GPU, VDD_CPU_SOC_MSS, VIN_SYS_5V0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("line, ram, cores, emc, gpu, cpu_mhz, warm, total", RECORDED.values(), ids=RECORDED)
def test_a_line_of_each_release(line, ram, cores, emc, gpu, cpu_mhz, warm, total):
    found = parse(line)
    assert (found.ram_used_mb, len(found.cores), found.cpu_mhz) == (ram, cores, cpu_mhz)
    assert (found.emc_percent, found.emc_mhz) == emc
    assert (found.gpu_percent, found.gpu_mhz) == gpu
    if warm is not None:
        assert found.temperatures_c[warm[0]] == warm[1]
    assert total_mw(found.rails_mw) == total
    assert not found.empty


def test_what_is_off_is_dropped_and_no_figure():
    found = parse(AGX_ORIN_DATED)
    assert set(found.temperatures_c) == {"CPU", "Tboard", "SOC2", "Tdiode", "SOC0", "tj", "SOC1"}
    assert "NC" not in found.rails_mw
    assert parse(TX2).cores[:3] == ((1, 345), None, None)
    assert "PMIC" not in parse(NANO).temperatures_c
    assert parse(THOR).rails_mw == {} and parse(THOR).temperatures_c == {}
    assert parse(AGX_ORIN_39).temperatures_c["cpu"] == 52.968


def test_memory_and_engines_are_no_rails():
    assert set(parse(NANO).rails_mw) == {"POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"}
    assert parse(AGX_ORIN_39).rails_mw["VIN_SYS_5V0"] == 5500


@pytest.mark.parametrize(
    "text", ["", "tegrastats: must be run as root", "sudo: a password is required", "Segmentation fault"]
)
def test_a_message_is_no_figure(text):
    assert parse(text).empty


PIECES = st.lists(st.sampled_from([word for line, *_ in RECORDED.values() for word in line.split(" ")]), max_size=40)


@given(st.one_of(st.text(), PIECES.map(" ".join), st.text(alphabet="RAMCPUGD3_FREQ0123456789@%[],/- mWC.\u0663")))
@example("RAM " + "9" * 5000 + "/1MB")
@example("CPU@" + "1" * 400 + "C")
@example("GR3D_FREQ @[]")
@example("GR3D_FREQ 0%@[ , ,]")
@example("CPU [\u0663%@\u0663]")
def test_any_text_is_a_line_and_no_exception(text):
    found = parse(text)
    assert isinstance(found, Line)
    assert all(value > -100 for value in found.temperatures_c.values())
    assert all(value >= 0 for value in found.rails_mw.values())


@given(st.dictionaries(st.from_regex(r"VDD_[A-Z0-9]{1,8}", fullmatch=True), st.integers(0, 99999), max_size=6))
def test_rails_come_back_as_they_were_printed(rails):
    for unit in ("", "mW"):
        assert parse(" ".join(f"{n} {mw}{unit}/1{unit}" for n, mw in rails.items())).rails_mw == rails
        assert parse(" ".join(f"{n} {mw}{unit}/1{unit}/2{unit}" for n, mw in rails.items())).rails_mw == rails
