"""trtexec's command line for each version, what it prints, and what a device's files say, from recorded text."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from edgeopt.onboard import device_facts, trtexec, trtexec_log
from edgeopt.spec import jetpack
from tests.tensorrt_device import SHAPES, STAND_IN

VERSIONS = ["8.0.1", "8.2.1", "8.4.1", "8.5.2", "8.6.2", "10.3.0", "10.16.2", "11.0.0", "11.4.1"]
XAVIER = {"sm": "7.2", "tensorrt": "8.5.2", "simulated": None}


def tool(version: str, path: str = "trtexec") -> trtexec.Trtexec:
    return trtexec.Trtexec(path, version, None)


def job(**recipe) -> dict:
    fields = {"candidate": "a", "shapes": SHAPES, "typing": "weak", "flags": ["fp16"], **recipe}
    return {"recipe": fields, "plugins": [], "calibration": None}


def argv(version: str, asked: dict, workspace: int | None = 512) -> list[str]:
    return trtexec.build_argv(tool(version), asked, "a.onnx", "engine.plan", "timing.cache", workspace)


def test_the_command_of_8_5():
    assert argv("8.5.2", job()) == [
        "trtexec", "--onnx=a.onnx", "--saveEngine=engine.plan", "--timingCacheFile=timing.cache", "--verbose",
        "--buildOnly", "--memPoolSize=workspace:512", "--minShapes=x:1x4", "--optShapes=x:2x4", "--maxShapes=x:8x4",
        "--fp16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "held", "lacking"),
    [
        ("8.2.1", {"--workspace=512", "--buildOnly"}, {"--memPoolSize=workspace:512"}),
        ("8.6.2", {"--memPoolSize=workspace:512", "--skipInference"}, {"--buildOnly"}),
        ("10.3.0", {"--skipInference"}, {"--stronglyTyped"}),
    ],
)
def test_options_that_came_and_went(version, held, lacking):
    words = set(argv(version, job()))
    assert held <= words and not lacking & words


def test_strong_typing_is_asked_for_where_weak_is_the_default():
    strong = job(typing="strong", flags=[])
    assert "--stronglyTyped" in argv("10.3.0", strong) and "--stronglyTyped" not in argv("11.0.0", strong)


def test_the_dla_falls_back_to_the_gpu_and_reads_its_scales():
    asked = {**job(dla=True, flags=["fp16", "int8"], shapes={}), "calibration": "scales"}
    words = argv("8.5.2", asked, None)
    assert words[-3:] == ["--calib=scales", "--useDLACore=0", "--allowGPUFallback"]
    assert not any("Shapes" in word or "workspace" in word for word in words)
    assert "--useDLACore=0" in trtexec.run_argv(tool("8.5.2"), asked, "engine.plan", {})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("typing", ["weak", "strong"])
def test_no_version_is_given_an_option_that_it_lacks(version, typing, tmp_path):
    """Against the recorded trtexec's own table of options; what it cannot build is refused before."""
    asked = job(typing=typing, flags=["fp16"] if typing == "weak" else [], shapes={}, dla=version != "11.0.0")
    asked["plugins"] = ["a.so"]
    facts = {"sm": "8.7", "tensorrt": version, "simulated": None}
    refused = trtexec.refusal(asked["recipe"], 13, facts)
    assert bool(refused) == version.startswith("11." if typing == "weak" else "8.")
    if refused:
        return
    (tmp_path / "settings.json").write_text(json.dumps({"version": version}))
    words = trtexec.build_argv(tool(version), asked, "a.onnx", "e", "t", 64)[1:]
    command = [sys.executable, str(STAND_IN), str(tmp_path / "settings.json"), "--help", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert trtexec.parse_version(done.stdout) == version and trtexec.parse_simulated(done.stdout)


def test_names_that_trtexec_would_split_are_quoted():
    assert trtexec.shape_options({"input:0": {"min": [1], "opt": [1], "max": [2]}})[0] == "--minShapes='input:0':1"
    assert trtexec.quoted("pair.0") == "pair.0"


@pytest.mark.parametrize(
    ("recipe", "opset", "facts", "words"),
    [
        ({"flags": ["int8"]}, 13, {"sm": "5.3", "tensorrt": "8.2.1"}, "no int8 arithmetic"),
        ({"flags": ["int8"]}, 13, {"sm": "6.2", "tensorrt": "8.2.1"}, "no int8 arithmetic"),
        ({"flags": ["bf16"]}, 17, {"sm": "7.2"}, "bf16 needs"),
        ({"flags": ["bf16"]}, 17, {"sm": "8.7", "tensorrt": "8.6.2"}, "bf16 needs"),
        ({}, 17, {"sm": "5.3", "tensorrt": "8.2.1"}, "opset 17 and TensorRT 8.2.1 reads up to 13"),
        ({}, 17, {"sm": "8.7", "tensorrt": "11.0.0"}, "strongly typed only"),
        ({"typing": "strong"}, 17, {"tensorrt": "8.6.2"}, "no strong typing"),
        ({"dla": True}, 13, {"sm": "5.3", "tensorrt": "8.2.1"}, "no DLA"),
        ({"dla": True, "typing": "strong", "flags": []}, 20, {"sm": "8.7", "tensorrt": "11.2.0"}, "back with 11.4.1"),
        ({}, 13, {"sm": None}, "no NVIDIA GPU"),
    ],
)
def test_what_a_device_cannot_build_is_refused_before_the_build(recipe, opset, facts, words):
    assert words in trtexec.refusal(job(**recipe)["recipe"], opset, {**XAVIER, **facts})


def test_what_it_can_build_is_not_refused():
    assert trtexec.refusal(job(flags=["fp16", "int8"], dla=True)["recipe"], 17, XAVIER) is None


@pytest.mark.parametrize("version", [*VERSIONS, "8.6.1", "9.0.0"])
def test_opsets_are_those_of_the_profiles_table(version):
    assert trtexec.opset_max(version) == jetpack.opset_max(version)


def test_the_workspace_fits_the_memory_and_too_little_is_refused():
    megabytes = 1 << 20
    assert trtexec.workspace_mb(45 * megabytes, 3000) == (3000 - 400 - 180) // 2
    assert trtexec.workspace_mb(45 * megabytes, 500) == 16 and trtexec.workspace_mb(1, None) is None
    assert trtexec.memory_refusal(45 * megabytes, 700, 0) is None
    assert trtexec.memory_refusal(45 * megabytes, 300, 400) is None
    refused = trtexec.memory_refusal(45 * megabytes, 300, 200)
    assert "300 MiB and 200 MiB of swap are free, about 580 MiB are needed" in refused


def test_progress_follows_the_layers_that_were_tried():
    seen = trtexec_log.Progress()
    for line in ("[I] Start parsing network model.", "[I] Finished parsing network model. Parse time: 0.1"):
        seen.feed(line)
    assert (seen.share, seen.stage) == (0.02, "arranging layers")
    for line in ("[V] [TRT] After tensor merging: 12 layers", "[V] [TRT] After concat removal: 10 layers"):
        seen.feed(line)
    for _ in range(5):
        seen.feed("[V] [TRT] =============== Computing costs for /features/features.0/Conv")
    assert seen.share == pytest.approx(0.02 + 0.5 * 0.93) and seen.stage == "trying kernels, layer 5 of 10"
    seen.feed("[I] [TRT] Total Activation Memory: 42924544 bytes")
    assert seen.share == 0.95
    seen.feed("[I] [TRT] Engine generation completed in 302.465 seconds.")
    assert seen.seconds == 302.465 and seen.share == 0.99


def test_progress_never_goes_back_and_without_layers_says_nothing_of_them():
    seen = trtexec_log.Progress()
    for _ in range(3):
        seen.feed("[V] [TRT] =============== Computing costs for ")
    assert (seen.share, seen.stage) == (0.02, "trying kernels")


@pytest.mark.parametrize(
    ("lines", "status", "kind", "words"),
    [
        (["[E] [TRT] 3: getPluginCreator could not find plugin: Round version: 1"], 1, "operator", "operator Round,"),
        (["In node 11 with name: /a and operator: GridSample3D (checkFallbackPluginImporter): INVALID_NODE"], 1,
         "operator", "operator GridSample3D,"),
        (["[I] [TRT] No importer registered for op: TRTBatchedNMS. Attempting to import as plugin.",
          "[E] [TRT] 2: [ltWrapper.cpp::setupHeuristic::349] Error Code 2: Internal Error (Assertion failed.)"], 1,
         "build", "TensorRT cannot build the engine: [TRT] 2: [ltWrapper"),
        (["[E] [TRT] 10: Could not find any implementation for node Conv_0 due to insufficient memory"], 1, "memory",
         "for any kernel"),
        (["[E] [TRT] 1: [defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of memory)"], 1, "memory",
         "not enough memory"),
        (["[W] [TRT] Skipping tactic 13 due to insufficient memory on requested size of 4229 detected for tactic",
          "[W] [TRT] Layer 'a': DLA not supported, switching to GPU", "[E] Saving engine failed"],
         1, "build", "TensorRT cannot build the engine: Saving engine failed"),
        ([], -9, "memory", "the system killed"),
        ([], -11, "killed", "signal 11"),
        (["[E] Unknown option: --stronglyTyped"], 1, "option", "--stronglyTyped"),
        (["write: No space left on device"], 1, "space", "disk of the device is full"),
    ],
)  # fmt: skip
def test_a_failed_build_is_one_sentence(lines, status, kind, words):
    found = trtexec_log.failure(lines, status)
    assert found[0] == kind and words in found[1] and "\n" not in found[1]


def test_tensorrts_own_words_for_a_wrong_engine_are_never_shown():
    said = (
        "[E] [TRT] 1: Serialization assertion stdVersionRead == serializationVersion failed.Version tag does not match."
    )
    kind, sentence = trtexec_log.failure_of_run([said], 1)
    assert kind == "load" and "edgeopt prepare" in sentence and "ersion tag" not in sentence


# first lines and device trees as recorded in dusty-nv/jetson-containers and rbonghi/jetson_stats
@pytest.mark.parametrize(
    ("line", "l4t"),
    [
        ("# R32 (release), REVISION: 7.2, GCID: 30192233, BOARD: t210ref, EABI: aarch64, DATE: Wed Apr 20", "32.7.2"),
        ("# R35 (release), REVISION: 6.1, GCID: 39721438, BOARD: t186ref, EABI: aarch64, DATE: Tue Mar  4", "35.6.1"),
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8", "36.4.3"),
        ("# R39 (release), REVISION: 2.1, GCID: 46758480, BOARD: generic, ... DATE: Fri Aug 7 05:54:22", "39.2.1"),
        ("# KERNEL_VARIANT: oot", None),
        ("", None),
        (None, None),
    ],
)
def test_l4t(line, l4t):
    assert device_facts.parse_l4t(line) == l4t


@pytest.mark.parametrize(
    ("compatible", "soc"),
    [
        ("nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0", "tegra234"),
        ("nvidia,p3509-0000+p3668-0000\0nvidia,tegra194\0", "tegra194"),
        ("raspberrypi,4-model-b\0brcm,bcm2711\0", None),
        (None, None),
    ],
)
def test_soc(compatible, soc):
    assert device_facts.parse_soc(compatible) == soc


def test_every_module_of_the_profiles_has_its_compute_capability():
    assert {m.soc: m.sm for m in jetpack.MODULES} == device_facts.SM_OF_SOC


def test_other_parsers():
    assert device_facts.parse_model("NVIDIA Jetson AGX Orin Developer Kit\0") == "NVIDIA Jetson AGX Orin Developer Kit"
    assert device_facts.parse_model("\0") is None
    assert device_facts.parse_l4t_package("35.6.1-20250304201132") == "35.6.1"
    assert device_facts.parse_meminfo("MemTotal: 4059712 kB\nMemAvailable: 1048576 kB\nSwapFree: 2048 kB\n") == (
        1024,
        2,
    )
    assert device_facts.parse_meminfo("") == (None, 0)
    assert device_facts.version_of_cuda(11040) == "11.4"


@pytest.mark.parametrize(
    ("number", "version"), [(8001, "8.0.1"), (8502, "8.5.2"), (100300, "10.3.0"), (101602, "10.16.2")]
)
def test_versions_as_numbers(number, version):
    assert device_facts.version_of_number(number) == version and device_facts.number_of_version(version) == number


def test_this_machines_facts_are_whole():
    facts = device_facts.describe("8.5.2", "a test")
    assert set(facts) == {"model", "gpu", "sm", "l4t", "cuda", "tensorrt", "simulated"}


def test_a_driver_is_asked_by_its_numbers(monkeypatch):
    """The calls of cuda.h, of a driver that is not here."""

    def attribute(into, which, device):
        into._obj.value = {75: 8, 76: 7}[which]

    def name(into, size, device):
        into.value = b"Orin"

    def version(into):
        into._obj.value = 12060

    driver = SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGet=lambda into, index: 0, cuDeviceGetName=name, cuDeviceGetAttribute=attribute,
        cuDriverGetVersion=version,
    )  # fmt: skip
    monkeypatch.setattr(device_facts.ctypes, "CDLL", lambda path: driver)
    facts = device_facts.describe("10.3.0")
    assert (facts["gpu"], facts["sm"], facts["cuda"]) == ("Orin", "8.7", "12.6")
