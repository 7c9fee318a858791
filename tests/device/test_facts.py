"""Facts of every recorded generation, value by value, and what parsers make of anything else: never an exception."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeopt.device import facts, facts_sources
from edgeopt.device.facts_sources import SOURCES, Answers, Values
from edgeopt.spec.facts import DeviceFacts, PowerMode
from tests.device.recordings import FOLDER, NAMES

EXPECTED = Path(__file__).parent / "recorded"
TABLES = {source.name for source in SOURCES if isinstance(source, Values)}


def of(**texts) -> DeviceFacts:
    """Facts of a device that answers `texts` alone ('_' stands for '-'); a dict is that of `Values`."""
    named = {name.replace("_", "-"): value for name, value in texts.items()}
    assert named.keys() <= {name for fact in facts.FACTS for name in fact.sources}
    tables = {name: value for name, value in named.items() if isinstance(value, dict)}
    return facts.of(Answers({n: v for n, v in named.items() if n not in tables}, tables))


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_device_is_read_value_by_value(name):
    assert facts.recorded(FOLDER / name).model_dump(mode="json") == json.loads((EXPECTED / f"{name}.json").read_text())


def test_every_recording_says_where_it_is_from():
    for name in NAMES:
        text = (FOLDER / name / "README.md").read_text()
        assert text.startswith("# ") and "omposed:" in text, name
    assert {path.stem for path in EXPECTED.iterdir()} == set(NAMES)


def test_every_field_is_said_by_some_recording_or_by_the_round_trip():
    said = {field for name in NAMES for field, value in json.loads((EXPECTED / f"{name}.json").read_text()).items()
            if value not in (None, [], {})}  # fmt: skip
    assert said == set(DeviceFacts.model_fields) - {"clock_skew_s", "emulated"}


@pytest.mark.parametrize(
    ("release", "l4t", "jetpack"),
    {
        "R32": ("# R32 (release), REVISION: 7.6, GCID: 38171779, BOARD: t186ref", "32.7.6", "4.6"),
        "R39": (
            "# R39 (release), REVISION: 2.1, GCID: 46758480, DATE: Fri Aug 7 05:54:22 AM UTC 2026",
            "39.2.1",
            "7.2",
        ),
        "a revision without a row": ("# R35 (release), REVISION: 9.9, GCID: 1", "35.9.9", "5.1"),
        "a major without a row": ("# R41 (release), REVISION: 0.3, GCID: 1", "41.0.3", None),
        "only the first line counts": ("# no release\n# R35 (release), REVISION: 6.1", None, None),
        "half a line": ("# R35 (release)", None, None),
        "empty": ("", None, None),
    }.values(),
)
def test_l4t_and_jetpack(release, l4t, jetpack):
    found = of(release=release)
    assert (found.l4t, found.jetpack) == (l4t, jetpack)


def test_a_made_up_release_file_gives_way_to_the_package():
    made_up = "# R36 (release), REVISION: 4.0, GCID: 12345678, BOARD: generic"
    package = "ii  nvidia-l4t-core 36.4.3-20250107174145\n"
    assert of(release=made_up, dpkg=package).l4t == "36.4.3"
    assert of(release=made_up).l4t == "36.4.0"
    assert of(dpkg="un  nvidia-l4t-core \nrc  libnvinfer8 8.5.2-1\n") == DeviceFacts()


@pytest.mark.parametrize(
    ("compatible", "model", "soc", "module"),
    {
        "a TX2 says quill": ("nvidia,quill\0nvidia,tegra186\0", "quill\0", "tegra186", "tx2"),
        "AGX Orin": ("nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0nvidia,tegra23x\0", "x\0", "tegra234", "orin-agx"),
        "Orin Nano": ("nvidia,p3768-0000+p3767-0003\0nvidia,tegra234\0", "x\0", "tegra234", "orin-nano"),
        "Orin NX": ("nvidia,p3768-0000+p3767-0001-super\0nvidia,tegra234\0", "x\0", "tegra234", "orin-nx"),
        "a carrier's own tree": ("acme,box\0nvidia,tegra234\0", "Acme Jetson Orin NX Box\0", "tegra234", "orin-nx"),
        "a name without hints": ("acme,box\0nvidia,tegra194\0", "Acme Box\0", "tegra194", None),
        "TX1 is none of ours": ("nvidia,p2597-2180\0nvidia,jetson-cv\0nvidia,p2180\0nvidia,tegra210\0", "jetson_tx1\0",
                                "tegra210", None),
        "Thor by its SoC alone": ("nvidia,tegra264\0", "", "tegra264", "thor"),
        "an SoC of the future": ("nvidia,tegra274\0", "NVIDIA Jetson Thor Next\0", "tegra274", None),
        "no NVIDIA": ("raspberrypi,5-model-b\0brcm,bcm2712\0", "Raspberry Pi 5\0", "bcm2712", None),
        "a virtual machine": ("linux,dummy-virt\0", "linux,dummy-virt\0", None, None),
        "words alone are not enough": ("", "NVIDIA Jetson AGX Orin\0", None, None),
    }.values(),
)  # fmt: skip
def test_soc_and_module(compatible, model, soc, module):
    found = of(compatible=compatible, model=model)
    assert (found.soc, found.module) == (soc, module)


@pytest.mark.parametrize(("text", "soc"), [("33\n", "tegra210"), ("24", "tegra186"), ("35", "tegra234"), ("99", None)])
def test_the_soc_by_its_chip_where_the_tree_is_missing(text, soc):
    assert of(chip_id=text).soc == soc
    assert of(soc_id=text).soc == soc
    assert of(chip_id="?", soc_id=text).soc == soc


@pytest.mark.parametrize(
    ("text", "mode"),
    {
        "name, then id": ("NV Power Mode: MAXN\n0\n", PowerMode(name="MAXN", id=0)),
        "the fan first": (
            "NV Fan Mode:quiet\nNV Power Mode: MODE_15W_6CORE\n2\n",
            PowerMode(name="MODE_15W_6CORE", id=2),
        ),
        "a warning first": ("NVPM WARN: fan mode is not set!\nNV Power Mode: 25W\n3\n", PowerMode(name="25W", id=3)),
        "the fan last": ("NV Power Mode: 25W\n3\nNV Fan Mode:cool\n", PowerMode(name="25W", id=3)),
        "without an id": ("NV Power Mode: 25W\n", PowerMode(name="25W", id=3)),
        "a failure": ("NVPM ERROR: optMask is 1, no request for power mode\n", None),
        "another tool": ("Power profile: ECO (0)\n", None),
    }.values(),
)
def test_the_power_mode(text, mode):
    conf = "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=3 NAME=25W >\n"
    assert of(nvpmodel=text, nvpmodel_conf=conf).power_mode == mode
    assert of(nvpmodel_conf=conf).power_modes == (PowerMode(name="MAXN", id=0), PowerMode(name="25W", id=3))


def test_the_power_mode_by_the_file_where_the_tool_wants_root():
    conf = "< POWER_MODEL ID=3 NAME=25W >\n"
    assert of(nvpmodel_status="pmode:0003 fmode:quiet", nvpmodel_conf=conf).power_mode == PowerMode(name="25W", id=3)
    assert of(nvpmodel_status="pmode:0003").power_mode is None


def test_sensors_that_are_off_and_rails_to_nowhere_are_left_out():
    at = "/sys/class/thermal/thermal_zone"
    zones = [("CPU", "41500"), ("CV0", "-256000"), ("PMIC-Die", "100000"), ("acpitz", "20000"), ("acpitz", "21000"),
             ("x", "")]  # fmt: skip
    thermal = {f"{at}{i}/type": kind for i, (kind, _) in enumerate(zones)}
    thermal |= {f"{at}{i}/temp": value for i, (_, value) in enumerate(zones)}
    assert of(thermal=thermal).temperatures_c == {"CPU": 41.5, "acpitz": 20.0, "acpitz 2": 21.0}
    ina = "/sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    rails = {f"{ina}/in1_label": "VDD_IN", f"{ina}/in1_input": "5000", f"{ina}/curr1_input": "10",
             f"{ina}/in2_label": "NC", f"{ina}/in2_input": "0", f"{ina}/curr2_input": "0",
             f"{ina}/in3_label": "sum of shunt voltages", f"{ina}/in3_input": "0", f"{ina}/curr3_input": "0",
             f"{ina}/in4_label": "unreadable"}  # fmt: skip
    assert of(hwmon_rails=rails).rails == ("VDD_IN",)


@pytest.mark.parametrize(
    ("found", "emulated"),
    [
        (of(uname="Linux 5.10 aarch64", cpuinfo="processor: 0\nvendor_id: GenuineIntel\nflags: sse\n"), "qemu-user"),
        (of(uname="Linux 5.10 aarch64", cpuinfo="processor: 0\nFeatures: asimd\n"), None),
        (of(uname="Linux 5.10 x86_64", cpuinfo="processor: 0\nvendor_id: GenuineIntel\nflags: sse\n"), None),
        (of(uname="Linux 6.1 x86_64", detect_virt="qemu\n"), "qemu-system"),
        (of(uname="Linux 6.1 x86_64", detect_virt="kvm\n"), None),
        (of(marks="/sys/firmware/devicetree/base/fw-cfg@9020000\n"), "qemu-system"),
        (of(python='{"python": "3.9.2", "emulated": "qemu-user 7.2"}'), "qemu-user 7.2"),
    ],
)
def test_emulation_is_seen(found, emulated):
    assert found.emulated == emulated


def test_containers_and_names_of_the_graphics_card():
    assert of(marks="/run/.containerenv\n").container == "podman"
    assert of(small={"/run/systemd/container": "lxc\n"}).container == "lxc"
    assert of(cgroup="12:cpu:/docker/0123456789abcdef\n").container == "docker"
    assert of(cgroup="0::/init.scope\n").container is None
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    assert of(nvidia_smi=failed, nvidia_smi_version=failed) == DeviceFacts()
    assert of(nvidia_smi="Tesla T4\n").gpus == ("Tesla T4",)


def test_the_clock_is_compared_at_the_middle_of_the_round_trip():
    def answers(begin, end):
        return Answers({"date": begin, "date-end": end}, asked_s=(1000.0, 1002.0))

    assert facts.of(answers("1000.900\n", "1001.100\n")).clock_skew_s == 0.0
    assert facts.of(answers("4601\n", "4601.%N\n")).clock_skew_s == 3600.5  # busybox has no fractions
    assert facts.of(answers("1000.9", "")).clock_skew_s is None
    assert facts.of(Answers({"date": "1", "date-end": "2"})).clock_skew_s is None


ANY = st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("utf-8", "replace"))
# near enough to what parsers look for to reach their inner branches
NEAR = st.lists(
    st.sampled_from([
        "R35 REVISION: ", "NV Power Mode: ", "pmode:", "< POWER_MODEL ID=", " NAME=", ">", "ii  libnvinfer8 ",
        "processor\t: 0", "CPU part: 0x", "CPU implementer: 0x41", "flags:", "MemTotal: ", " kB", "@/tmp writable",
        "tegra",
        "nvidia,p3767-", "CUDA Version: ", "#define CUDNN_MAJOR ", "#define NV_TENSORRT_MAJOR ",
        '{"python": ', '{"packages": []}', "}", "-",
        "99999999999999999999999999", "0-", "٣", "²", "\0", "\n", "\n\n", ",", ".", ":", "1e999", "nan", "/", "\ud7ff",
    ]) | ANY, max_size=12,
).map("".join)  # fmt: skip
TEXT = st.none() | ANY | NEAR
PATHS = st.sampled_from([
    "/sys/class/thermal/thermal_zone0/type", "/sys/class/thermal/thermal_zone0/temp", "/type", "type", "",
    "/x/in1_label", "/x/in1_input", "/x/curr1_input", "/i/rail_name_0", "/i/in_power0_input",
    "/sys/class/devfreq/17000000.gpu/cur_freq", "/sys/class/devfreq/bwmgr/max_freq", "/c/scaling_cur_freq",
    "/sys/devices/system/cpu/present", "/emc/rate",
    "/sys/devices/system/cpu/online", "/run/systemd/container", "/sys/class/dmi/id/product_name",
]) | ANY  # fmt: skip
TABLE = st.dictionaries(PATHS, ANY | NEAR | st.from_regex(r"-?[0-9]{1,20}\n?"), max_size=8)


@settings(max_examples=500)
@given(st.sampled_from(facts.FACTS).flatmap(
    lambda fact: st.tuples(st.just(fact), *(TABLE if name in TABLES else TEXT for name in fact.sources))
))  # fmt: skip
def test_no_answer_makes_a_parser_fail(asked):
    fact, *answers = asked
    found = fact.parse(*answers)
    DeviceFacts(**found)
    assert None not in found.values()


def test_no_damage_to_a_recording_makes_a_parser_fail():
    """Each answer of each device cut, overwritten or doubled somewhere; a file that is missing is a field that is."""
    dice = random.Random(20261201)
    for name in NAMES:
        whole = facts_sources.recorded(FOLDER / name)
        for _ in range(12):
            texts = {n: _damaged(dice, t) for n, t in whole.texts.items() if dice.random() > 0.1}
            values = {n: {_damaged(dice, p): _damaged(dice, t) for p, t in table.items()}
                      for n, table in whole.values.items() if dice.random() > 0.1}  # fmt: skip
            facts.of(Answers(texts, values, (0.0, 1.0)))
        for missing in [*whole.texts, *whole.values]:
            facts.of(Answers({n: t for n, t in whole.texts.items() if n != missing},
                             {n: t for n, t in whole.values.items() if n != missing}))  # fmt: skip
    assert facts.of(Answers()) == DeviceFacts()


def _damaged(dice: random.Random, text: str) -> str:
    if dice.random() < 0.5 or not text:
        return text
    at = dice.randrange(len(text))
    junk = "".join(
        chr(dice.choice([0, 9, 10, 32, 45, 48, 57, 0x661, 0xFFFD, dice.randrange(1, 0xD800)])) for _ in range(4)
    )
    return dice.choice([text[:at], text[at:], text[:at] + junk + text[at + 4 :], text[:at] + text])


@settings(max_examples=200)
@given(st.dictionaries(st.from_regex(r"[a-z][a-z-]{0,12}", fullmatch=True), st.binary(max_size=80), max_size=6),
       st.binary(max_size=40))  # fmt: skip
def test_frames_hold_any_bytes(content, noise):
    token = "0123456789abcdef" * 2
    output = noise + b"".join(b"\n%s %s\n%s" % (token.encode(), n.encode(), data) for n, data in content.items())
    assert facts_sources.frames(output, token) == content


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_frames_of_anything(output):
    found = facts_sources.frames(output, "\n")
    assert isinstance(facts.of(facts_sources.answers(found)), DeviceFacts)


def test_a_path_that_holds_a_colon_is_told_from_its_value():
    at = "/sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    text = (
        f"{at}/rail_name_0:POM_5V_IN\n{at}/in_power0_input:1022\n{at}/other:1\nnoise\n{at}/rail_name_1:A:B\n".encode()
    )
    found = facts_sources.answers({"iio-rails": text}).of("iio-rails")
    assert found == {f"{at}/rail_name_0": "POM_5V_IN", f"{at}/in_power0_input": "1022", f"{at}/rail_name_1": "A:B"}


def test_the_table_names_sources_that_are_there_and_uses_each():
    own = {"user", "shell", "home", "which", "df", "python", "date", "date-end"}
    used = {name for fact in facts.FACTS for name in fact.sources}
    there = {source.name for source in SOURCES}
    assert used <= there | own and there <= used
    assert len(there) == len(SOURCES)
