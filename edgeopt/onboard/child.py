"""The child's side: loads one candidate and answers the parent's commands, a JSON line each.

`load` -> {"done", "load_s", "flags"}; `feeds` -> {"feed", "outputs"} each, then {"done", "first_call_s"};
`tune` -> {"done", "setting", "tried", "flags"}; `warm` -> {"done", "calls", "seconds", "stable"};
`round SECONDS` -> {"done", "calls_s", "window": [from, to, calls] or null}; `end` -> {"done", "peak_rss_bytes",
"gpu_bytes"}. In place of any line: {"failure": ...}.

A round lasts at least so many SECONDS where its window is wanted: sensors are slower than models. The calls after
those that are timed belong to the window alone. Times of a window are perf_counter()'s, which processes share.
"""

import contextlib
import json
import os
import sys
import time

from . import adaptors, machine, processes, tensors, timing, tuning
from . import request as requests
from .failures import of_exception
from .predictor import check_outputs


def main(request_path, name):
    """Serve commands from stdin. The answers get a descriptor of their own: libraries print to 1."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    processes.die_with_parent()  # one that hangs would never see stdin end
    _die_first()
    session = _Session(requests.read(request_path), name, lambda line: _send(answers, line))
    steps = {
        "load": session.load, "feeds": session.feeds, "tune": session.tune, "warm": session.warm,
        "round": session.round, "end": session.end,
    }  # fmt: skip
    kinds = {"load": "load"}
    for command in sys.stdin:
        command, _, argument = command.strip().partition(" ")
        try:
            line = steps[command](*([float(argument)] if argument else []))
        except Exception as error:  # anything that a runtime or a model throws is data for the host
            _send(answers, {"failure": of_exception(error, kinds.get(command, "run")).as_dict()})
            return
        line["done"] = True
        _send(answers, line)


class _Session:
    """The loaded candidate and what it was measured with; for throughput one program a stream."""

    def __init__(self, request, name, send):
        self._request = request
        self._candidate = [c for c in request["candidates"] if c["name"] == name][0]
        self._send = send
        self._programs = []
        self._setting = dict(tuning.DEFAULT, threads=request.get("threads"))

    def load(self):
        started = time.perf_counter()
        self._programs = [self._open(self._setting)]
        return {"load_s": time.perf_counter() - started, "flags": self._programs[0].records}

    def _open(self, setting):
        request, given = self._request, self._candidate
        candidate = dict(given, flags=dict(given.get("flags") or {}, **setting["flags"]))
        adaptor = adaptors.find(candidate, measuring=True)
        return adaptor.open_program(
            request["folder"], candidate, request["inputs"], request["outputs"], request["op_libraries"],
            setting["threads"],
        )  # fmt: skip

    def feeds(self):
        """Run every feed once and write its outputs; the first call of the process is timed."""
        request, first_call_s = self._request, None
        writer = tensors.Writer(request["out"], self._candidate["name"] + ".bin")
        for feed in request["feeds"]:
            arrays = self._arrays(feed)
            started = time.perf_counter()
            outputs = self._programs[0].call(arrays)
            if first_call_s is None:
                first_call_s = time.perf_counter() - started
            check_outputs(outputs, request["outputs"])
            refs = {s["name"]: writer.add(array, s["dtype"]) for s, array in zip(request["outputs"], outputs)}
            self._send({"feed": feed["id"], "outputs": refs})
        writer.close()
        return {"first_call_s": first_call_s}

    def tune(self):
        """Take the best of the runtime's settings. Outputs were taken before: they do not depend on them.

        Each setting is opened and called twice, the second time in reverse order, and its better median counts.
        """
        measure, request = self._request["measure"], self._request
        choices = tuning.settings(
            self._candidate, measure.get("mode", "latency"), machine.cores(), request.get("threads"),
            measure.get("streams"),
        )  # fmt: skip
        if len(choices) == 1 and choices[0] == self._setting:
            return {"setting": self._setting, "tried": [], "flags": self._programs[0].records}
        medians, failures = [[] for _ in choices], {}
        limit_s = float(measure["max_s"]) / (8 * len(choices))
        order = list(range(len(choices))) if len(choices) > 1 else []
        for index in order + order[::-1]:
            try:
                self._set(choices[index])
                timing.warm_up(self._calls()[0], limit_s / 2)
                medians[index].append(timing.median(self._figures(min(measure["calls"], 20), limit_s)))
            except Exception as error:  # it costs this setting its place, and no other
                failures[index] = of_exception(error, "run").message
        tried = [
            dict(choice, ms=None if i in failures else 1e3 * min(medians[i]), failure=failures.get(i))
            for i, choice in enumerate(choices) if order
        ]  # fmt: skip
        self._set(choices[tuning.best([setting["ms"] for setting in tried])] if tried else choices[0])
        return {"setting": self._setting, "tried": tried, "flags": self._programs[0].records}

    def warm(self):
        """Call until stable (see timing), for a quarter of the candidate's time at most."""
        if self._has_clock():
            return {"calls": 0, "seconds": 0.0, "stable": True}  # each of its rounds has a warm-up of its own
        limit_s = float(self._request["measure"]["max_s"]) / (4 * len(self._programs))
        return [timing.warm_up(call, limit_s) for call in self._calls()][-1]

    def round(self, least_s=0.0):
        """Warm up, then time: at most max_s / rounds seconds, and at least one call; go on until `least_s`."""
        measure = self._request["measure"]
        if self._has_clock():
            calls_s = self._programs[0].timed_calls(self._timing_arrays(), measure["calls"], least_s)
            return {"calls_s": calls_s, "window": self._programs[0].window}
        limit_s = float(measure["max_s"]) / measure["rounds"]
        for call in self._calls():
            timing.timed_calls(call, max(1, measure["warmup"]), limit_s / 4)
        started = time.perf_counter()
        calls_s = self._figures(measure["calls"], limit_s)
        if measure.get("mode") == "throughput":  # how many calls its streams made is not known, but how many a second
            ended = time.perf_counter()
            return {"calls_s": calls_s, "window": [started, ended, (ended - started) / calls_s[0]]}
        more = timing.call_until(self._calls()[0], started + min(least_s, limit_s))
        return {"calls_s": calls_s, "window": [started, time.perf_counter(), len(calls_s) + more]}

    def end(self):
        peak, gpu = getattr(self._programs[0], "peak_rss_bytes", peak_rss_bytes)(), _torch_gpu_bytes()
        while self._programs:
            self._programs.pop().close()
        return {"peak_rss_bytes": peak, "gpu_bytes": gpu}

    def _set(self, setting):
        """Have the programs of `setting` open and no others; torch changes its number of threads as it is."""
        same = dict(setting, threads=None) == dict(self._setting, threads=None)
        if same and self._programs and hasattr(self._programs[0], "set_threads"):
            self._programs[0].set_threads(setting["threads"])
        else:
            while self._programs:
                self._programs.pop().close()
            self._programs = [self._open(setting) for _ in range(setting["streams"])]
        self._setting = setting

    def _calls(self):
        """One function of no arguments a stream, numpy in to numpy out."""
        arrays = self._timing_arrays()
        return [lambda call=program.call: call(arrays) for program in self._programs]

    def _figures(self, count, limit_s):
        """Seconds of each call, or in throughput mode the one figure seconds / answers."""
        if self._request["measure"].get("mode") == "throughput":
            return [timing.seconds_a_call(self._calls(), count, limit_s)]
        return timing.timed_calls(self._calls()[0], count, limit_s)

    def _has_clock(self):
        """Whether the program times its calls itself, such as trtexec."""
        return hasattr(self._programs[0], "timed_calls")

    def _timing_arrays(self):
        return self._arrays([f for f in self._request["feeds"] if f["id"] == self._request["measure"]["feed"]][0])

    def _arrays(self, feed):
        return [tensors.read(self._request["folder"], feed["inputs"][s["name"]]) for s in self._request["inputs"]]


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


def _torch_gpu_bytes():
    """The most GPU memory that torch's allocator held, where torch is what runs; None elsewhere."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda.max_memory_reserved() if cuda is not None and cuda.is_initialized() else None


def _send(stream, line):
    stream.write(json.dumps(line) + "\n")
    stream.flush()


def _die_first():
    """Where memory runs out the kernel ends a candidate, and neither the runner nor what else this machine does."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")
