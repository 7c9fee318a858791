"""tensorrt, as it is measured: trtexec runs the engine, a process a question. Applications use trt.py.

A latency is what trtexec calls so: input copied to the GPU, computed, output copied back. Its outputs are decimal
numbers of six digits, which is 1e-6 of their size. Formats: exportJSONTrace and exportJSONOutput in trtexec's
samples/common/sampleReporting.cpp; --loadInputs takes raw bytes.
"""

import json
import math
import os
import re
import resource
import shutil
import subprocess
import threading
import time

from . import device_facts, engines, trtexec, trtexec_log
from .failures import Failure
from .fuser import record
from .release import read_manifest

MODULE = "numpy"
PIP_NAMES = "numpy"

_RUN_S = 900
_WARM_UP_MS = 200  # trtexec's own default


def open_program(folder, candidate, inputs, outputs, op_libraries, threads):
    """The engine of `candidate` in a release, loaded once as a proof. Failure where it is not built for this device."""
    manifest = read_manifest(folder)
    tool = trtexec.find()
    facts = device_facts.describe(tool.version, tool.simulated)
    job, engine = engines.ready(folder, manifest, candidate["name"], facts)
    program = Program(tool, job, engine, inputs, outputs)
    try:
        program.prove()
    except BaseException:
        program.close()
        raise
    return program


class Program:
    """An engine that trtexec runs, called with arrays in the order of the manifest's inputs."""

    def __init__(self, tool, job, engine, inputs, outputs):
        self.records = [record("engine", engine.name, "applied", "measured by trtexec, TensorRT %s" % tool.version)]
        if tool.simulated:
            self.records.append(record("simulated", tool.simulated, "applied", tool.simulated))
        self._tool, self._job, self._engine = tool, job, engine
        self._inputs, self._outputs, self.window = inputs, outputs, None
        self._folder = _scratch(engine)

    def prove(self):
        """Load the engine and run it once, on numbers of trtexec's own."""
        shapes = {name: ranges["opt"] for name, ranges in self._job["recipe"]["shapes"].items()}
        self._run(shapes, ["--iterations=1", "--warmUp=0", "--duration=0"])

    def call(self, arrays):
        path = os.path.join(self._folder, "outputs.json")
        self._run_on(arrays, ["--iterations=1", "--warmUp=0", "--duration=0", "--exportOutput=" + path])
        with open(path, encoding="utf-8") as f:
            return read_outputs(f.read(), self._outputs)

    def timed_calls(self, arrays, count, least_s=0.0):
        """Seconds of each of `count` calls after trtexec's warm-up; it goes on calling for `least_s`.

        `window` is then [from, to, calls] of all of them, see child: trtexec says for how long it has timed once it is
        done, and the moment at which it says so is the end.
        """
        path, self.window = os.path.join(self._folder, "times.json"), None
        counts = ["--iterations=%d" % count, "--warmUp=%d" % _WARM_UP_MS, "--duration=%d" % math.ceil(least_s)]
        counts.append("--exportTimes=" + path)
        self._run_on(arrays, counts)
        with open(path, encoding="utf-8") as f:
            times = read_times(f.read())
        if len(times) < count:
            raise Failure("run", "trtexec timed %d calls instead of %d" % (len(times), count))
        return times[-count:]  # before 8.6 the trace begins with the warm-up

    def peak_rss_bytes(self):
        """Of the largest of the processes that were run."""
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024

    def close(self):
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run_on(self, arrays, options):
        """Run at the sizes of `arrays` with their values."""
        moving = self._job["recipe"]["shapes"]
        shapes, files = {}, []
        for position, (spec, array) in enumerate(zip(self._inputs, arrays)):
            name = "input%d.bin" % position  # in trtexec's working folder, whose path may hold what it splits at
            with open(os.path.join(self._folder, name), "wb") as f:
                f.write(as_taken(array, spec["dtype"], self._tool.at_least(9)).tobytes())
            files.append("%s:%s" % (trtexec.quoted(spec["name"]), name))
            if spec["name"] in moving:
                shapes[spec["name"]] = list(array.shape)
        self._run(shapes, ["--loadInputs=" + ",".join(files)] + options)

    def _run(self, shapes, options):
        argv = trtexec.run_argv(self._tool, self._job, self._engine.plan, shapes) + options
        lines, late = [], []
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self._folder
        ) as process:
            timer = threading.Timer(_RUN_S, lambda: (late.append(True), process.kill()))
            timer.start()
            try:
                for line in process.stdout:
                    lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                    self.window = read_window(lines[-1], time.perf_counter()) or self.window
            except BaseException:
                process.kill()
                raise
            finally:
                timer.cancel()
        if late:
            raise Failure("timeout", "trtexec did not end within %d s; it was stopped" % _RUN_S)
        if process.returncode != 0:
            kind, message = trtexec_log.failure_of_run(lines, process.returncode)
            raise Failure("memory" if kind == "memory" else "run", message)


def _scratch(engine):
    """A folder of this process beside the engine; those of processes that were killed are removed."""
    for name in os.listdir(engine.folder):
        if re.match(r"run-\d+$", name) and not os.path.exists("/proc/" + name[4:]):
            shutil.rmtree(engine.path(name), ignore_errors=True)
    folder = engine.path("run-%d" % os.getpid())
    os.makedirs(folder, exist_ok=True)
    return folder


def as_taken(array, dtype, has_int64):
    """The array as the engine takes it: before TensorRT 9 int64 is int32 there. Failure where a value does not fit."""
    import numpy

    if dtype == "bfloat16":
        return (numpy.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2")
    if dtype == "int64" and not has_int64:
        small = array.astype(numpy.int32)
        if not (small == array).all():
            raise Failure("run", "this TensorRT computes int64 in int32, which an input's values do not fit")
        return small
    return numpy.ascontiguousarray(array)


def read_outputs(text, outputs):
    """Arrays in the order of the manifest's `outputs` from the JSON of --exportOutput. Failure where one is lacking."""
    import numpy

    # C++ prints what JSON has no word for: nan, -nan, inf and -inf among the values
    text = re.sub(r"(?<=[\s,\[])-?nan(?=[\s,\]])", "NaN", text)
    text = re.sub(r"(?<=[\s,\[])(-?)inf(?=[\s,\]])", r"\1Infinity", text)
    found = {row["name"]: row for row in json.loads(text)}
    arrays = []
    for spec in outputs:
        row = found.get(spec["name"])
        if row is None:
            raise Failure("run", "the engine has no output '%s': %s" % (spec["name"], ", ".join(sorted(found))))
        shape = [int(size) for size in row["dimensions"].split("x")] if row["dimensions"] else []
        dtype = "float32" if spec["dtype"] == "bfloat16" else spec["dtype"]
        arrays.append(numpy.array(row["values"]).astype(dtype).reshape(shape))
    return arrays


def read_window(line, now):
    """[from, to, calls] where `line` is 'Timing trace has 126 queries over 3.0734 s' (printProlog), else None."""
    found = re.search(r"Timing trace has ([0-9]{1,9}) queries over ([0-9.]{1,20}) s\s*$", line)
    try:
        return [now - float(found.group(2)), now, int(found.group(1))] if found else None
    except ValueError:
        return None


def read_times(text):
    """Seconds of each call from the JSON of --exportTimes."""
    return [row["latencyMs"] / 1e3 for row in json.loads(text)]
