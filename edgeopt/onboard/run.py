"""The runner: measures the candidates of a folder on this device. A failure is an answer, never a traceback.

    python3 onboard.pyz run REQUEST.json RESPONSE.json      exit 0 whenever a response was written
    python3 onboard.pyz environment                         facts of the device as JSON on stdout
    python3 onboard.pyz prepare | engines | ready ...       engines for TensorRT, see prepare.py

REQUEST: {"protocol": 1,
  "folder": the folder that file names are relative to,    "out": an existing folder for raw outputs,
  "candidates": [{"name", "runtime", "precision", "file", "flags"}, ...]     as in the manifest,
  "inputs": [{"name", "dtype", "shape"}, ...], "outputs": the same,          as in the manifest,
  "op_libraries": [file, ...]                              loaded before the model,
  "feeds": [{"id", "inputs": {name: TensorRef}}, ...]      TensorRef: {"file", "offset", "dtype", "shape"},
  "measure": null or {"feed": id, "rounds", "calls", "warmup", "max_s"},     max_s: seconds a candidate,
  "threads": null or int,
  "timeout_s": the longest silence of a candidate,         "total_s": null or seconds for everything}

RESPONSE: {"protocol": 1, "environment": {...}, "failure": null or of kind "request",
  "candidates": {name: {"status": "ok" or "failed",
    "failure": null or {"kind", "message", "signal"}       kinds: failures.KINDS,
    "flags": [{"flag", "value", "status": "applied", "missing" or "refused", "message"}],
    "load_s", "first_call_s",     null where it did not come so far; load_s includes the runtime's import,
    "rounds_s": [[seconds of each call] of each round],    "peak_rss_bytes",
    "outputs": {feed id: {name: TensorRef into `out`}}}}}

Each candidate has a process of its own; all are loaded at once and take turns, round by round, so that a
device that heats up slows all of them alike. One that was killed for memory beside the others runs once more,
alone.
Exit status: 2 for a wrong command line, 28 (ENOSPC) where there is no space for the response.
"""

import errno
import json
import os
import sys
import time

from . import environment, prepare
from . import request as requests
from .children import Child
from .failures import Failure

NO_SPACE = 28
# A runtime's threads spin for up to 50 ms after a call (onnxruntime: 2^20 pauses), in the next one's time.
_SETTLE_S = 0.1

_USAGE = (
    "usage: onboard.pyz run REQUEST.json RESPONSE.json | onboard.pyz environment"
    " | onboard.pyz prepare RELEASE [CANDIDATE ...] | onboard.pyz engines ROOT PASSPORT ...\n"
)


def main(argv):
    """The command line; returns the exit status."""
    if len(argv) > 1 and argv[0] in prepare.COMMANDS:
        return prepare.main(argv)
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
        "failure": None, "candidates": {},
    }  # fmt: skip
    try:
        request = requests.read(request_path)
    except Failure as failure:
        response["failure"] = failure.as_dict()
        return response
    response["candidates"] = _measure_all(os.path.abspath(request_path), request)
    return response


def _measure_all(request_path, request):
    names = [candidate["name"] for candidate in request["candidates"]]
    deadline = time.perf_counter() + request["total_s"] if request.get("total_s") else None
    results = _measure_together(request_path, request, names, deadline)
    if len(names) > 1:
        for name in names:
            failure = results[name]["failure"]
            if failure and failure["kind"] == "memory":
                results.update(_measure_together(request_path, request, [name], deadline))
    return results


def _measure_together(request_path, request, names, deadline):
    """Load and feed each candidate, then measure them in turns; returns their results by name."""
    results = {name: _empty_result() for name in names}
    children = {}
    try:
        for name in names:
            children[name] = Child(request_path, name, request["timeout_s"], request.get("threads"), deadline)
            _attempt(children, results, name, _load_and_feed)
        for number in range((request.get("measure") or {}).get("rounds", 0)):
            # every second round in reverse: what follows a hot neighbour is not always the same candidate
            for name in sorted(children, key=names.index, reverse=number % 2 == 1):
                if len(children) > 1:
                    time.sleep(_SETTLE_S)
                _attempt(children, results, name, _one_round)
        for name in list(children):
            _attempt(children, results, name, _end)
    finally:
        for child in children.values():
            child.close()
    return results


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


def _one_round(child, result):
    result["rounds_s"].append(child.ask("round")["calls_s"])


def _end(child, result):
    result["peak_rss_bytes"] = child.ask("end")["peak_rss_bytes"]


def _empty_result():
    return {
        "status": "ok", "failure": None, "flags": [], "load_s": None, "first_call_s": None, "rounds_s": [],
        "peak_rss_bytes": None, "outputs": {},
    }  # fmt: skip


def _replace(path, text):
    part = path + ".part"
    with open(part, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
