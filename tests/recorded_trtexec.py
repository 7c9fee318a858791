"""A stand-in for trtexec: real lines of its output, and onnxruntime in place of the GPU. It says that it is simulated.

    recorded_trtexec.py SETTINGS.json [trtexec's own arguments]

SETTINGS: {"version": "8.5.2", "until": null or a file whose appearance a build waits for at its fifth layer,
"fail": null, "memory", "operator" or "killed"}. The options of
each version are those of samples/common/sampleOptions.cpp; one that the version does not have ends it as there.

Where the lines were recorded (public logs, shortened):
8.5.2   Jetson Orin NX 8 GB: NVIDIA/TensorRT issue 3355; the banner: NVIDIA/TensorRT issue 3183 (8.4.2, same form)
8.6.3   RTX 2080: NVIDIA/TensorRT issue 3747
10.x    Jetson Orin NX 16 GB, 10.16.2: OE4T/meta-tegra pull request 2243; 'Total Weights Memory' and 'Engine generation
        completed': collabora/WhisperLive issue 369
layers  'After concat removal', 'Computing costs for' (--verbose): logs of 8.x and 10.x quoted in NVIDIA's own material
errors  onnx/onnx-tensorrt issue 800 (operator), open-mmlab/mmdeploy issue 1059 (memory)
times   exportJSONTrace, exportJSONOutput and printProlog of samples/common/sampleReporting.cpp
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

MARK = "recorded lines of trtexec, with onnxruntime in place of TensorRT"
LAYERS = 9

# option -> (first version, first version without it)
OPTIONS = {
    "onnx": ((8,), None), "saveEngine": ((8,), None), "loadEngine": ((8,), None), "timingCacheFile": ((8,), None),
    "verbose": ((8,), None), "buildOnly": ((8,), (10,)), "skipInference": ((8, 6), None),
    "workspace": ((8,), (10,)), "memPoolSize": ((8, 4), None), "minShapes": ((8,), None), "optShapes": ((8,), None),
    "maxShapes": ((8,), None), "shapes": ((8,), None), "fp16": ((8,), (11,)), "int8": ((8,), (11,)),
    "bf16": ((9,), (11,)), "stronglyTyped": ((9, 1), (11,)), "calib": ((8,), (11,)), "useDLACore": ((8,), None),
    "allowGPUFallback": ((8,), None), "plugins": ((8,), (11,)), "staticPlugins": ((8, 6), None),
    "loadInputs": ((8,), None), "exportOutput": ((8,), None), "exportTimes": ((8,), None),
    "iterations": ((8,), None), "warmUp": ((8,), None), "duration": ((8,), None), "help": ((8,), None),
}  # fmt: skip


def main() -> int:
    settings = json.loads(Path(sys.argv[1]).read_text())
    argv = sys.argv[2:]
    version = tuple(int(part) for part in settings["version"].split("."))
    command = f"[TensorRT v{number(version)}] # trtexec {' '.join(argv)}"
    print(f"&&&& RUNNING TensorRT.trtexec {command}")
    print(f"simulated: {MARK}", flush=True)
    given = dict(argument.removeprefix("--").partition("=")[::2] for argument in argv)
    for name in given:
        first, last = OPTIONS.get(name, ((99,), None))
        if version < first or (last and version >= last):
            return failed(command, f"Unknown option: --{name} {given[name]}")
    if "help" in given:
        return 0
    if "loadEngine" in given:
        return run(given, version, command)
    return build(given, version, settings, command)


def number(version: tuple[int, ...]) -> int:
    major, minor, patch = version
    return major * 10000 + minor * 100 + patch if major >= 10 else major * 1000 + minor * 100 + patch


def say(level: str, text: str) -> None:
    print(f"[11/30/2026-21:00:00] [{level}] {text}", flush=True)


def failed(command: str, *lines: str) -> int:
    for line in lines:
        say("E", line)
    print(f"&&&& FAILED TensorRT.trtexec {command}", flush=True)
    return 1


def build(given: dict, version: tuple[int, ...], settings: dict, command: str) -> int:
    say("I", "=== Device Information ===")
    say("I", "[TRT] [MemUsageChange] Init CUDA: CPU +0, GPU +0, now: CPU 37, GPU 1957 (MiB)")
    say("I", "Start parsing network model" + ("." if version >= (8, 6) else ""))
    if settings.get("fail") == "operator":
        say("I", "[TRT] No importer registered for op: Round. Attempting to import as plugin.")
        say("E", "[TRT] 3: getPluginCreator could not find plugin: Round version: 1")
        return failed(command, "Failed to parse onnx file", "Parsing model failed", "Engine set up failed")
    if wrong := wrong_shapes(given):
        return failed(command, wrong, "Network And Config setup failed", "Building engine failed")
    say("I", "Finish parsing network model" if version < (8, 6) else "Finished parsing network model. Parse time: 0.01")
    cache = Path(given["timingCacheFile"])
    use = "Loaded" if cache.exists() else "Could not read timing cache from"
    say("I", f"{use} {cache}")
    say("V", f"[TRT] After concat removal: {LAYERS} layers")
    for layer in range(LAYERS):
        say("V", f"[TRT] =============== Computing costs for {f'layer{layer}' if version >= (8, 6) else ''}")
        say("V", "[TRT] *************** Autotuning format combination: Float(4,1) -> Float(8,1) ***************")
        if layer == 4 and settings.get("until"):
            wait_for(Path(settings["until"]))
        if layer == 4 and settings.get("fail") == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if layer == 4 and settings.get("fail") == "memory":
            say(
                "W",
                "[TRT] Tactic Device request: 4364MB Available: 3788MB. Device memory is insufficient to use tactic.",
            )
            say("E", "[TRT] 10: Could not find any implementation for node Conv_0 due to insufficient memory")
            return failed(command, "Engine could not be created from network", "Building engine failed")
    say("I", "[TRT] Total Activation Memory: 42924544" + (" bytes" if version >= (10,) else ""))
    say("I", "[TRT] Detected 1 inputs and 1 output network tensors.")
    Path(given["saveEngine"]).write_text(json.dumps({"given": given, "version": version}))
    cache.write_bytes(b"kernel times")
    if version >= (10,):
        say("I", "[TRT] Total Weights Memory: 157136256 bytes")
        say("I", "[TRT] Engine generation completed in 3.00621 seconds.")
    say("I", "Engine built in 3.1 sec.")
    print(f"&&&& PASSED TensorRT.trtexec {command}", flush=True)
    return 0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120  # of a test that failed meanwhile
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def wrong_shapes(given: dict) -> str | None:
    """What trtexec has against the shapes: a static model takes none, an input with moving sizes needs all three."""
    import onnx

    inputs = onnx.load(given["onnx"], load_external_data=False).graph.input
    moving = {i.name for i in inputs if any(d.dim_param for d in i.type.tensor_type.shape.dim)}
    for which in ("minShapes", "optShapes", "maxShapes"):
        named = set(parse_shapes(given.get(which, "")))
        if named and not moving:
            return (
                "Static model does not take explicit shapes since the shape of inference tensors will be determined "
                "by the model itself"
            )
        if not moving <= named:
            return f"{which} is missing for the dynamic inputs {sorted(moving - named)}"
    return None


def parse_shapes(text: str) -> dict[str, list[int]]:
    pairs = [item.rpartition(":") for item in text.split(",") if item]
    return {name: [int(size) for size in sizes.split("x")] for name, _, sizes in pairs}


def run(given: dict, version: tuple[int, ...], command: str) -> int:
    import numpy as np
    import onnxruntime as ort

    engine = json.loads(Path(given["loadEngine"]).read_text())
    if tuple(engine["version"]) != version:
        say("E", "[TRT] 1: [stdArchiveReader.cpp::StdArchiveReader::40] Error Code 1: Serialization (Serialization "
            "assertion stdVersionRead == serializationVersion failed.Version tag does not match. Note: Current "
            "Version: 213, Serialized Engine Version: 205)")  # fmt: skip
        return failed(command, "Engine deserialization failed")
    session = ort.InferenceSession(engine["given"]["onnx"], providers=["CPUExecutionProvider"])
    shapes, files = (
        parse_shapes(given.get("shapes", "")),
        dict(item.split(":", 1) for item in given.get("loadInputs", "").split(",") if item),
    )
    feeds = {}
    for value in session.get_inputs():
        shape = shapes.get(value.name, value.shape)
        dtype = np.dtype({"tensor(float)": "f4", "tensor(int64)": "i8", "tensor(float16)": "f2"}[value.type])
        stored = np.dtype("i4") if dtype == np.int64 and version < (9,) else dtype
        data = np.fromfile(files[value.name], stored) if value.name in files else np.zeros(int(np.prod(shape)), stored)
        if data.size != np.prod(shape):
            return failed(command, f"Note: Expected: {np.prod(shape)} values, got {data.size}")
        feeds[value.name] = data.astype(dtype).reshape(shape)
    names, times = [o.name for o in session.get_outputs()], []
    say("I", "Starting inference")
    first = time.perf_counter()
    while len(times) < int(given["iterations"]) or time.perf_counter() - first < float(given.get("duration", 0)):
        started = time.perf_counter()
        outputs = session.run(names, feeds)
        times.append(1e3 * (time.perf_counter() - started))
    say("I", "Warmup completed 1 queries over 200 ms")
    say("I", f"Timing trace has {len(times)} queries over {time.perf_counter() - first:g} s")
    if "exportOutput" in given:
        Path(given["exportOutput"]).write_text(exported(names, outputs))
    if "exportTimes" in given:
        rows = [
            f'{{ "startEnqMs" : {i}, "endEnqMs" : {i + 0.1:g}, "h2dMs" : 0.01, "computeMs" : {ms:g}, "d2hMs" : 0.01, '
            f'"latencyMs" : {ms + 0.02:g} }}\n' for i, ms in enumerate(times)
        ]  # fmt: skip
        Path(given["exportTimes"]).write_text("[\n  " + ", ".join(rows) + "]\n")
    say("I", "=== Performance summary ===")
    print(f"&&&& PASSED TensorRT.trtexec {command}", flush=True)
    return 0


def exported(names: list[str], outputs: list) -> str:
    """As exportJSONOutput writes it: six digits, dimensions joined by x."""
    rows = [
        f'{{ "name" : "{name}"\n  , "dimensions" : "{"x".join(map(str, array.shape))}"\n  , "values" : [ '
        + ", ".join(f"{value:g}" for value in array.ravel().tolist()) + " ]\n  }\n"
        for name, array in zip(names, outputs, strict=True)
    ]  # fmt: skip
    return "[\n  " + ", ".join(rows) + "]\n"


if __name__ == "__main__":
    sys.exit(main())
