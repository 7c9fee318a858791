"""Which profile a recorded device gets, and the sentence for each way in which one does not fit."""

from __future__ import annotations

import pytest

from edgeopt.device import facts
from edgeopt.device.matching import Fit, fit, fits
from edgeopt.spec.facts import DeviceFacts
from edgeopt.spec.profile import load_profile, profile_names
from tests.device.recordings import FOLDER, NAMES

XAVIER = facts.recorded(FOLDER / "agx-xavier-r35")


BEST = [
    ("nano-r32", ["nano", "arm64-cpu"], []),
    ("tx2-r32", ["tx2", "arm64-cpu"], []),
    ("xavier-nx-r32", ["xavier-nx@4.6", "arm64-cpu"], ["xavier@4.6"]),
    ("agx-xavier-r35", ["xavier", "arm64-cpu"], ["xavier-nx"]),
    ("orin-nx-r36", ["orin-nx", "arm64-cpu"], ["orin-nano", "orin-agx"]),
    ("container-r36", ["orin-nano@6.1", "arm64-cpu"], ["orin-nx@6.1", "orin-agx@6.1"]),
    ("agx-orin-r39", ["orin-agx@7.2", "arm64-cpu"], ["orin-nano@7.2", "orin-nx@7.2"]),
    ("thor-r38", ["thor@7.0", "arm64-cpu"], []),
    ("desktop-cuda", ["x86-cpu"], ["desktop-cuda"]),
    ("raspberry-pi-5", ["arm64-cpu"], []),
    ("future-r41", ["arm64-cpu"], []),
]


@pytest.mark.parametrize(("name", "fitting", "nearly"), BEST)
def test_the_profiles_of_a_recorded_device(name, fitting, nearly):
    found = fits(facts.recorded(FOLDER / name))
    assert [f.profile for f in found if f.verdict == "fits"] == fitting
    assert [f.profile for f in found if f.verdict == "nearly"] == nearly
    assert len(found) == len(profile_names())
    assert all((f.verdict == "fits") == (not f.reasons) for f in found)


def test_no_recorded_device_is_left_out():
    assert sorted(name for name, *_ in BEST) == NAMES


@pytest.mark.parametrize(
    ("change", "verdict", "sentence"),
    [
        ({"arch": "x86_64"}, "no", "it is for aarch64, the device is x86_64"),
        ({"sm": "8.7"}, "no", "its GPU has compute capability 7.2, the device's 8.7"),
        ({"soc": None, "l4t": None}, "no", "it is for a Jetson, and the device is none"),
        ({"module": "xavier-nx"}, "nearly", "it is for the module xavier, the device is xavier-nx"),
        ({"l4t": "35.1.0", "jetpack": "5.0"}, "nearly",
         "it is for JetPack 5.1 (L4T 35.6.4), the device has JetPack 5.0 (L4T 35.1.0)"),
        ({"l4t": "41.0.3", "jetpack": None}, "nearly",
         "it is for JetPack 5.1 (L4T 35.6.4), the device has L4T 41.0.3, which edgeopt does not know"),
        ({"python": "3.9.2"}, "nearly", "it is for Python 3.8, the device has 3.9.2"),
        ({"packages": {"torch": "2.4.0"}}, "nearly", "it is for torch 1.11 to 2.1, the device has 2.4.0"),
        ({"tensorrt": "8.4.1"}, "nearly", "it is for TensorRT 8.5.2, the device has 8.4.1"),
        ({"memory_bytes": 15 << 30}, "nearly", "it is for 32 GB of memory, the device has 15.0 GiB"),
    ],
)  # fmt: skip
def test_each_difference_is_a_sentence(change, verdict, sentence):
    found = fit(XAVIER.model_copy(update=change), load_profile("xavier"))
    assert (found.verdict, found.reasons) == (verdict, (sentence,))


@pytest.mark.parametrize("field", ["sm", "module", "l4t", "python", "packages", "tensorrt", "memory_bytes", "arch"])
def test_what_the_device_does_not_say_is_no_difference(field):
    unknown = DeviceFacts.model_fields[field].default
    assert fit(XAVIER.model_copy(update={field: unknown}), load_profile("xavier")).verdict == "fits"


def test_cpu_instructions_and_graphics_cards():
    x86 = DeviceFacts(arch="x86_64", cpu_flags=("sse2",))
    assert fit(x86, load_profile("x86-cpu")).reasons == ("its CPU has avx2, the device's has not",)
    vnni = load_profile("x86-cpu", {"target.vnni": "true"})
    assert fit(DeviceFacts(arch="x86_64", cpu_flags=("avx2",)), vnni).reasons == (
        "its CPU has VNNI, the device's has not",
    )
    assert fit(DeviceFacts(arch="x86_64", cpu_flags=("avx2", "avx_vnni")), vnni).verdict == "fits"
    none = fit(DeviceFacts(arch="x86_64", cpu_flags=("avx2",)), load_profile("desktop-cuda"))
    assert none.verdict == "no" and "none was found" in none.reasons[0]
    # a card whose driver is too old to say its capability is a card all the same
    old = DeviceFacts(arch="x86_64", cpu_flags=("avx2",), gpus=("Tesla T4",))
    assert fit(old, load_profile("desktop-cuda")).verdict == "fits"
    jetson = fit(XAVIER, load_profile("desktop-cuda"))
    assert jetson.verdict == "no" and "it is for a graphics card, and the device is a Jetson" in jetson.reasons


def test_a_device_that_says_nothing_gets_no_wrong_word():
    assert all(isinstance(f, Fit) for f in fits(DeviceFacts()))
