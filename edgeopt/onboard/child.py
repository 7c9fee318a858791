"""The child's side: loads one candidate and answers the parent's commands, a JSON line each.

`load` -> {"done", "load_s", "flags"}; `feeds` -> {"feed", "outputs"} each, then {"done", "first_call_s"};
`round` -> {"done", "calls_s"}; `end` -> {"done", "peak_rss_bytes"}. In place of any line: {"failure": ...}.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time

from . import adaptors, tensors
from . import request as requests
from .failures import of_exception
from .predictor import check_outputs

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(request_path, name):
    """Serve commands from stdin. The answers get a descriptor of their own: libraries print to 1."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _die_with_parent()
    session = _Session(requests.read(request_path), name, lambda line: _send(answers, line))
    steps = {"load": session.load, "feeds": session.feeds, "round": session.round, "end": session.end}
    kinds = {"load": "load"}
    for command in sys.stdin:
        command = command.strip()
        try:
            line = steps[command]()
        except Exception as error:  # anything that a runtime or a model throws is data for the host
            _send(answers, {"failure": of_exception(error, kinds.get(command, "run")).as_dict()})
            return
        line["done"] = True
        _send(answers, line)


class _Session:
    """The loaded candidate and what it was measured with."""

    def __init__(self, request, name, send):
        self._request = request
        self._candidate = [c for c in request["candidates"] if c["name"] == name][0]
        self._send = send
        self._program = None

    def load(self):
        request = self._request
        adaptor = adaptors.find(self._candidate, measuring=True)
        started = time.perf_counter()
        self._program = adaptor.open_program(
            request["folder"], self._candidate, request["inputs"], request["outputs"],
            request["op_libraries"], request.get("threads"),
        )  # fmt: skip
        return {"load_s": time.perf_counter() - started, "flags": self._program.records}

    def feeds(self):
        """Run every feed once and write its outputs; the first call of the process is timed."""
        request, first_call_s = self._request, None
        writer = tensors.Writer(request["out"], self._candidate["name"] + ".bin")
        for feed in request["feeds"]:
            arrays = self._arrays(feed)
            started = time.perf_counter()
            outputs = self._program.call(arrays)
            if first_call_s is None:
                first_call_s = time.perf_counter() - started
            check_outputs(outputs, request["outputs"])
            refs = {s["name"]: writer.add(array, s["dtype"]) for s, array in zip(request["outputs"], outputs)}
            self._send({"feed": feed["id"], "outputs": refs})
        writer.close()
        return {"first_call_s": first_call_s}

    def round(self):
        """Warm up, then time every call; at most max_s / rounds seconds, and at least one call."""
        measure = self._request["measure"]
        arrays = self._arrays([f for f in self._request["feeds"] if f["id"] == measure["feed"]][0])
        if hasattr(self._program, "timed_calls"):  # a program of its own clock, such as trtexec
            return {"calls_s": self._program.timed_calls(arrays, measure["calls"])}
        limit_s = float(measure["max_s"]) / measure["rounds"]
        self._timed_calls(arrays, measure["warmup"], limit_s / 4)
        return {"calls_s": self._timed_calls(arrays, measure["calls"], limit_s)}

    def end(self):
        peak = getattr(self._program, "peak_rss_bytes", peak_rss_bytes)()
        self._program.close()
        return {"peak_rss_bytes": peak}

    def _arrays(self, feed):
        return [tensors.read(self._request["folder"], feed["inputs"][s["name"]]) for s in self._request["inputs"]]

    def _timed_calls(self, arrays, count, limit_s):
        """Seconds of each of `count` calls, numpy in to numpy out; fewer where `limit_s` is used up."""
        call, clock, times = self._program.call, time.perf_counter, []
        gc.collect()
        gc.disable()  # as timeit does: a collection is not the model's time
        try:
            end = clock() + limit_s
            while len(times) < count and (not times or clock() < end):
                started = clock()
                call(arrays)
                times.append(clock() - started)
        finally:
            gc.enable()
        return times


def peak_rss_bytes():
    """Peak resident memory. VmHWM starts anew at exec; ru_maxrss takes over the parent's peak."""
    try:
        with open("/proc/self/status") as f:
            for line in f:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _send(stream, line):
    stream.write(json.dumps(line) + "\n")
    stream.flush()


def _die_with_parent():
    """Have the kernel end this process with its parent: one that hangs would never see stdin end."""
    with contextlib.suppress(OSError, AttributeError):  # a libc without it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
