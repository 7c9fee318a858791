"""What sampling costs: the same model measured with and without sensors, in turns; the goal is below 2 % of latency.

    .venv/bin/python benchmarks/sampler.py [--rounds 9] [--intervals 0.05,0.1,0.2] [--root DIR]

Each figure is a runner of its own, as `validate` starts it: p50 of a matrix product in onnxruntime on one thread and on
all. Without --root the sensors are a tree of files as an Orin NX shows them, twice as many as it has, and a command
that prints tegrastats' line; that a real INA3221 answers over I2C costs waiting, and no processor. With `--root /` they
are this machine's own. `cpu` is the processor's time that the sampling thread took, as a share of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from interleaved import compare, report
from onnx import TensorProto, helper, numpy_helper

from edgeopt.runtime.zipapp import write_zipapp

SIZE, LAYERS = 384, 6
LINE = "RAM 1/2MB CPU [9%@1190,6%@1190] GR3D_FREQ 62%@306 cpu@41.5C VDD_IN 4067mW/4067mW"


def main(argv: list[str]) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--intervals", default="0.05,0.1,0.2")
    options.add_argument("--root", default=None)
    options.add_argument("--calls", type=int, default=100)
    options.add_argument("--one", nargs=2, metavar=("FOLDER", "INTERVAL"), help=argparse.SUPPRESS)
    given = options.parse_args(argv)
    if given.one:
        print(measure(Path(given.one[0]), float(given.one[1]), given.root, given.calls))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        rows: dict[str, object] = {"rounds": given.rounds}
        for interval in given.intervals.split(","):
            shared = [sys.executable, __file__, "--calls", str(given.calls)]
            shared += ["--root", given.root] if given.root else []
            found = compare([*shared, "--one", name, interval], [*shared, "--one", name, "0"], rounds=given.rounds)
            low, high = found.spread
            rows[f"interval {interval} s: latency with / without"] = round(found.ratio, 4)
            rows[f"interval {interval} s: least and largest of a pair"] = [round(low, 4), round(high, 4)]
            costs = [float(line) for line in (folder / f"cost-{interval}").read_text().split()]
            rows[f"interval {interval} s: cpu"] = round(statistics.median(costs), 5)
        report("sampler", rows)
    return 0


def prepare(folder: Path) -> Path:
    """The model, the runner, the tree of sensors, and the command."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(SIZE, SIZE)).astype(np.float32) / SIZE**0.5 for _ in range(LAYERS)]
    names = ["x", *(f"h{i}" for i in range(LAYERS - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(LAYERS)]
    shape = [SIZE, SIZE]
    graph = helper.make_graph(
        nodes, "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), folder / "m.onnx")
    (folder / "x.bin").write_bytes(weights[0].tobytes())
    write_zipapp(folder)
    plant(folder / "root")
    script = folder / "bin" / "tegrastats"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nwhile echo '{LINE}'; do sleep 0.1; done\n")
    script.chmod(0o755)
    return folder


def plant(root: Path) -> None:
    """Two INA3221 of three rails, twelve thermal zones, eight cooling devices, eight CPUs: 46 files to read."""
    files = {}
    for chip in range(2):
        for n in (1, 2, 3):
            stem = f"sys/bus/i2c/drivers/ina3221/1-004{chip}/hwmon/hwmon{chip}"
            files |= {f"{stem}/in{n}_label": f"RAIL_{chip}{n}", f"{stem}/in{n}_input": "5000"}
            files |= {f"{stem}/curr{n}_input": "900", f"{stem}/curr{n}_crit_alarm": "0"}
    for n in range(12):
        files |= {f"sys/class/thermal/thermal_zone{n}/{k}": v for k, v in (("type", f"zone{n}"), ("temp", "45000"))}
    for n in range(8):
        device = f"sys/class/thermal/cooling_device{n}"
        files |= {f"{device}/type": f"z{n}-throttle-alert", f"{device}/cur_state": "0", f"{device}/max_state": "1"}
        clock = f"sys/devices/system/cpu/cpu{n}/cpufreq"
        files |= {f"{clock}/scaling_cur_freq": "1984000", f"{clock}/scaling_max_freq": "1984000"}
    for path, value in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(value + "\n")


def measure(folder: Path, interval_s: float, root: str | None, calls: int) -> float:
    """p50 in ms of one runner; `interval_s` 0 without sensors. What sampling cost is written to a file beside it."""
    spec = {"name": "x", "dtype": "float32", "shape": [SIZE, SIZE]}
    with tempfile.TemporaryDirectory() as scratch:
        request = {
            "protocol": 1, "folder": str(folder), "out": scratch, "op_libraries": [], "threads": None, "timeout_s": 60,
            "candidates": [{"name": "m", "runtime": "onnxruntime", "precision": "fp32", "file": "m.onnx", "flags": {}}],
            "inputs": [spec], "outputs": [{**spec, "name": "y"}],
            "feeds": [{"id": "a", "inputs": {"x": {**spec, "file": "x.bin", "offset": 0}}}],
            "measure": {"feed": "a", "rounds": 5, "calls": calls, "warmup": 5, "max_s": 60, "repeats": 0},
        }  # fmt: skip
        if interval_s:
            request["sensors"] = {"interval_s": interval_s, "root": root or str(folder / "root"), "idle_s": 0.1}
        (Path(scratch) / "request.json").write_text(json.dumps(request))
        argv = [sys.executable, str(folder / "onboard.pyz"), "run", f"{scratch}/request.json", f"{scratch}/r.json"]
        env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(argv, check=True, env=env)
        found = json.loads((Path(scratch) / "r.json").read_text())
    if found["failure"] or found["candidates"]["m"]["failure"]:
        sys.exit(str(found["failure"] or found["candidates"]["m"]["failure"]))
    if interval_s:
        sensors = found["sensors"]
        took_s = sensors["rounds"][-1]["ended_s"] - sensors["started_s"]
        with open(folder / f"cost-{interval_s:g}", "a") as f:
            f.write(f"{sensors['cpu_s'] / took_s}\n")
    return 1e3 * statistics.median(s for calls_s in found["candidates"]["m"]["rounds_s"] for s in calls_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
