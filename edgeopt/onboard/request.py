"""Reading a request: every key checked before any work, so that a wrong one is an answer and no crash."""

import json
import re

from .failures import Failure

PROTOCOL = 1

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
_MEASURE = {"feed": str, "rounds": int, "calls": int, "warmup": int, "max_s": (int, float)}
_MEASURE_OPTIONAL = {
    "mode": str, "streams": (int, type(None)), "tune": list, "repeats": int, "lock": (str, type(None)),
    "lock_wait_s": (int, float), "duration_s": (int, float, type(None)),
}  # fmt: skip
_SENSORS = {
    "interval_s": (int, float), "sudo": int, "root": str, "round_s": (int, float), "idle_s": (int, float),
}  # fmt: skip
_MODES = ("latency", "throughput")
_KEYS = {
    "protocol": int, "folder": str, "out": str, "candidates": list, "inputs": list, "outputs": list,
    "op_libraries": list, "feeds": list, "timeout_s": (int, float),
}  # fmt: skip
_OPTIONAL = {
    "measure": (dict, type(None)), "threads": (int, type(None)), "total_s": (int, float, type(None)),
    "memory_bytes": (int, type(None)), "sensors": (dict, type(None)), "progress": (str, type(None)),
}  # fmt: skip


def read(path):
    """The request at `path`, checked. Raises Failure of kind 'request' that names the key."""
    try:
        with open(path, encoding="utf-8") as f:
            request = json.load(f)
    except (OSError, ValueError) as error:
        raise Failure("request", "cannot read the request: %s" % error) from None
    if not isinstance(request, dict):
        raise Failure("request", "the request is not a JSON object")
    if request.get("protocol") != PROTOCOL:
        asked = request.get("protocol")
        raise Failure("request", "this runner speaks protocol %d, the request is of %r" % (PROTOCOL, asked))
    _check_keys(request)
    return request


def _check_keys(request):
    _check_types(request, _KEYS, required=True, where="")
    _check_types(request, _OPTIONAL, required=False, where="")
    for key in sorted(set(request) - set(_KEYS) - set(_OPTIONAL)):
        raise Failure("request", "unknown key '%s'" % key)
    for candidate in request["candidates"]:
        _check_types(candidate, {"name": str, "runtime": str, "file": str}, required=True, where="candidates: ")
        if not _NAME.match(candidate["name"]):  # it becomes the name of a file in `out`
            raise Failure("request", "candidates: the name %r is not a plain name" % candidate["name"])
        _check_path(candidate["file"])
    for path in request["op_libraries"]:
        _check_path(path)
    for feed in request["feeds"]:
        _check_types(feed, {"id": str, "inputs": dict}, required=True, where="feeds: ")
        for spec in request["inputs"]:
            if spec["name"] not in feed["inputs"]:
                raise Failure("request", "feed %s lacks input '%s'" % (feed["id"], spec["name"]))
        for ref in feed["inputs"].values():
            _check_path(ref["file"])
    _check_measure(request)
    _check_sensors(request)


def _check_measure(request):
    measure = request.get("measure")
    if measure is None:
        return
    _check_types(measure, _MEASURE, required=True, where="measure: ")
    _check_types(measure, _MEASURE_OPTIONAL, required=False, where="measure: ")
    if measure.get("mode", _MODES[0]) not in _MODES:
        raise Failure("request", "measure: 'mode' is not one of: " + ", ".join(_MODES))
    if measure.get("streams") is not None and measure["streams"] < 1:
        raise Failure("request", "measure: 'streams' must be at least 1")
    if measure["feed"] not in [feed["id"] for feed in request["feeds"]]:
        raise Failure("request", "measure: there is no feed '%s'" % measure["feed"])
    for key in ("rounds", "calls"):
        if measure[key] < 1:
            raise Failure("request", "measure: '%s' must be at least 1" % key)


def _check_sensors(request):
    sensors = request.get("sensors")
    if sensors is not None:
        _check_types(sensors, _SENSORS, required=False, where="sensors: ")
        for key in sorted(set(sensors) - set(_SENSORS)):
            raise Failure("request", "sensors: unknown key '%s'" % key)
        if sensors.get("interval_s", 1) < 0.01:
            raise Failure("request", "sensors: 'interval_s' must be at least 0.01")
    if request.get("progress") not in (None, "stdout"):
        raise Failure("request", "'progress' must be null or \"stdout\"")


def _check_types(value, keys, required, where):
    if not isinstance(value, dict):
        raise Failure("request", "%sexpected an object, found %r" % (where, value))
    for key, kind in sorted(keys.items()):
        if key not in value:
            if required:
                raise Failure("request", "%smissing key '%s'" % (where, key))
            continue
        if not isinstance(value[key], kind) or isinstance(value[key], bool):
            raise Failure("request", "%skey '%s' is of the wrong type: %r" % (where, key, value[key]))


def _check_path(path):
    if not isinstance(path, str) or path.startswith("/") or ".." in path.split("/"):
        raise Failure("request", "the path %r leaves the folder" % path)
