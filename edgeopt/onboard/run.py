"""The runner: measures the candidates of a folder on this device. A failure is an answer, never a traceback.

    python3 onboard.pyz run REQUEST.json RESPONSE.json      exit 0 whenever a response was written
    python3 onboard.pyz environment                         facts of the device as JSON on stdout
    python3 onboard.pyz prepare | engines | ready ...       engines for TensorRT, see prepare.py
    python3 onboard.pyz passports | engine | adopt ...      engines built elsewhere, see spread.py

REQUEST: {"protocol": 1,
  "folder": the folder that file names are relative to,    "out": an existing folder for raw outputs,
  "candidates": [{"name", "runtime", "precision", "file", "flags"}, ...]     as in the manifest,
  "inputs": [{"name", "dtype", "shape"}, ...], "outputs": the same,          as in the manifest,
  "op_libraries": [file, ...]                              loaded before the model,
  "feeds": [{"id", "inputs": {name: TensorRef}}, ...]      TensorRef: {"file", "offset", "dtype", "shape"},
  "measure": null or {"feed": id, "rounds", "calls", "warmup", "max_s",      max_s: seconds a candidate,
    "mode": "latency" or "throughput", "streams": null or int,               see timing.seconds_a_call
    "tune": [names of candidates whose settings are to be found by trial],   see tuning
    "repeats": how many rounds of a busy machine may be done again,
    "lock": null or a file, "lock_wait_s",                                   see lock
    "duration_s": null or how long to go on measuring},                      a soak; these all may be left out
  "sensors": null or {...},                                sampled while candidates are measured, see sample
  "progress": null or "stdout",                            a JSON line there after each round, see turns.teller;
                                                           the measurement ends with whoever reads them
  "threads": null or int,                                  "memory_bytes": null or what a candidate may hold,
  "timeout_s": the longest silence of a candidate,         "total_s": null or seconds for everything}

RESPONSE: {"protocol": 1, "environment": {...}, "failure": null or of kind "request" or "locked",
  "noise": null or {"cores", "load", "others", "steal": medians of the rounds that count, shares or null,
    "busy_rounds": of those, "repeated": rounds done again, "lock": see lock.measuring},
  "sensors": null or see sample, with "rounds": [{"started_s", "ended_s", "busy", "throttled": names,
    "counts": whether the candidates' rounds hold it}, ...] of all rounds; left out where it was not asked for,
  "candidates": {name: {"status": "ok" or "failed",
    "failure": null or {"kind", "message", "signal"}       kinds: failures.KINDS,
    "flags": [{"flag", "value", "status": "applied", "missing" or "refused", "message"}],
    "load_s", "first_call_s",     null where it did not come so far; load_s includes the runtime's import,
    "rounds_s": [[seconds of each call] of each round],    one figure a round for throughput: seconds / answers
    "windows": [[from, to, calls] or null of each round],  with sensors; more calls than were timed, see child
    "gpu_bytes": null or the most GPU memory of its allocator,    with sensors
    "warm_up": null or {"calls", "seconds", "stable"},     "peak_rss_bytes",
    "setting": null or {"threads", "streams", "flags"},    "tried": [a setting with its "ms", ...],
    "outputs": {feed id: {name: TensorRef into `out`}}}}}

Each candidate has a process of its own; all are loaded at once and take turns, round by round, so that a
device that heats up slows all of them alike. A round in which others used the machine, or the device throttled, is
done again, `repeats` times at most; then the least doubtful count. One that was killed for memory beside the others
runs once more, alone. While anything is timed a lock keeps other measurements off this machine; `environment` and
outputs need none.
Exit status: 2 for a wrong command line, 28 (ENOSPC) where there is no space for the response.
"""

import errno
import json
import os
import sys
import time

from . import environment, lock, prepare, spread, turns
from . import request as requests
from .children import Child
from .failures import Failure
from .sample import Sampler

NO_SPACE = 28
_LOCK_WAIT_S = 600  # for another measurement, where the request does not say

_USAGE = (
    "usage: onboard.pyz run REQUEST.json RESPONSE.json | onboard.pyz environment"
    " | onboard.pyz prepare RELEASE [CANDIDATE ...] | onboard.pyz engines ROOT PASSPORT ...\n"
)


def main(argv):
    """The command line; returns the exit status."""
    if len(argv) > 1 and argv[0] in prepare.COMMANDS:
        return prepare.main(argv)
    if len(argv) > 1 and argv[0] in spread.COMMANDS:
        return prepare.main(argv, spread.COMMANDS)
    if argv == ["environment"]:
        sys.stdout.write(json.dumps(environment.describe(), sort_keys=True) + "\n")
        return 0
    if len(argv) != 3 or argv[0] != "run":
        sys.stderr.write(_USAGE)
        return 2
    response = respond(argv[1])
    try:
        _replace(argv[2], json.dumps(response, sort_keys=True))
    except OSError as error:
        sys.stderr.write("cannot write the response %s: %s\n" % (argv[2], error.strerror))
        return NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
    return 0


def respond(request_path):
    """Do what the request at `request_path` asks; returns the response."""
    response = {
        "protocol": requests.PROTOCOL, "environment": environment.describe(),
        "failure": None, "noise": None, "candidates": {},
    }  # fmt: skip
    try:
        request = requests.read(request_path)
        sampler = Sampler(request["sensors"]) if request.get("sensors") is not None else None
        try:
            found = _measure_all(os.path.abspath(request_path), request, sampler)
        finally:
            sensors = sampler.stop() if sampler is not None else None
        response["candidates"], response["noise"], rounds = found
        if sampler is None:  # nor does a host that is older know these keys
            for result in response["candidates"].values():
                del result["windows"], result["gpu_bytes"]
        else:
            response["sensors"] = sensors if sensors is None else dict(sensors, rounds=rounds)
    except Failure as failure:
        response["failure"] = failure.as_dict()
    return response


def _measure_all(request_path, request, sampler):
    """The results by name, what else the machine did (None where nothing was to be measured), and all rounds."""
    names = [candidate["name"] for candidate in request["candidates"]]
    deadline = time.perf_counter() + request["total_s"] if request.get("total_s") else None
    results, spans, every, held = _measure_together(request_path, request, names, deadline, sampler)
    if len(names) > 1:
        for name in names:
            failure = results[name]["failure"]
            if failure and failure["kind"] == "memory":
                alone, more, of_it, held = _measure_together(request_path, request, [name], deadline, sampler)
                results.update(alone)
                spans += more
                every += of_it
    return results, dict(turns.noise(spans), lock=held) if request.get("measure") is not None else None, every


def _measure_together(request_path, request, names, deadline, sampler):
    """Load and feed each candidate, then measure in turns; (results by name, spans that count, all spans, the lock).

    The machine's lock is held from the first timed call to the last: what only loads keeps nobody waiting. The time
    that it is waited for does not count.
    """
    results = {name: _empty_result() for name in names}
    measure, children, spans, every, held = request.get("measure"), {}, [], [], None

    def start(name, deadline):
        children[name] = Child(
            request_path, name, request["timeout_s"], request.get("threads"), deadline, request.get("memory_bytes")
        )
        if sampler is not None:
            sampler.processes[name] = children[name].pid
        _attempt(children, results, name, _load_and_feed)

    def one_round(name, least_s):
        _attempt(children, results, name, lambda child, result: _one_round(child, result, least_s))

    try:
        for name in names:
            start(name, deadline)
        if measure is not None:
            with lock.measuring(measure.get("lock"), measure.get("lock_wait_s", _LOCK_WAIT_S)) as held:
                deadline = None if deadline is None else deadline + held["waited_s"]
                for child in children.values():
                    child.deadline = deadline
                if sampler is not None:
                    sampler.start()
                for name in [name for name in children if name in measure.get("tune", ())]:
                    _attempt(children, results, name, _tune)
                    if name not in children:  # a setting that ends the process costs the candidate its settings only
                        lost, results[name] = results[name]["failure"], _empty_result()
                        start(name, deadline)
                        results[name]["tried"] = [{"ms": None, "failure": lost["message"]}]
                for name in list(children):
                    _attempt(children, results, name, _warm)
                tell = turns.teller(results, measure, sampler) if request.get("progress") else None
                spans, every = turns.measure(children, results, names, measure, one_round, sampler, tell)
                if sampler is not None:
                    sampler.look_at_gpu()
        for name in list(children):
            _attempt(children, results, name, _end)
    finally:
        for child in children.values():
            child.close()
    return results, spans, every, held


def _attempt(children, results, name, step):
    """One step of one child; where it fails the failure is its result, and the child is gone."""
    try:
        step(children[name], results[name])
    except Failure as failure:
        results[name]["failure"] = failure.as_dict()
        results[name]["status"] = "failed"
        children.pop(name).close()


def _load_and_feed(child, result):
    loaded = child.ask("load")
    result["load_s"], result["flags"] = loaded["load_s"], loaded["flags"]
    fed = child.ask("feeds", lambda line: result["outputs"].update({line["feed"]: line["outputs"]}))
    result["first_call_s"] = fed["first_call_s"]


def _tune(child, result):
    tuned = child.ask("tune")
    result["setting"], result["tried"], result["flags"] = tuned["setting"], tuned["tried"], tuned["flags"]


def _warm(child, result):
    warmed = child.ask("warm")
    result["warm_up"] = {key: warmed[key] for key in ("calls", "seconds", "stable")}


def _one_round(child, result, least_s):
    answer = child.ask("round %g" % least_s)
    result["rounds_s"].append(answer["calls_s"])
    result["windows"].append(answer["window"])


def _end(child, result):
    ended = child.ask("end")
    result["peak_rss_bytes"], result["gpu_bytes"] = ended["peak_rss_bytes"], ended["gpu_bytes"]


def _empty_result():
    return {
        "status": "ok", "failure": None, "flags": [], "load_s": None, "first_call_s": None, "rounds_s": [],
        "peak_rss_bytes": None, "outputs": {}, "warm_up": None, "setting": None, "tried": [], "windows": [],
        "gpu_bytes": None,
    }  # fmt: skip


def _replace(path, text):
    part = path + ".part"
    with open(part, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
