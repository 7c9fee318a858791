"""Asking for engines: `prepare` starts what is missing and returns at once, `engines` says how far it is.

    python3 onboard.pyz prepare RELEASE [CANDIDATE ...]     a line of JSON on stdout
    python3 onboard.pyz engines ROOT/engines PASSPORT ...   the same, of engines that `prepare` named
    python3 onboard.pyz ready RELEASE CANDIDATE ...         the same; a failure where one would not load

The answer: {"root", "facts": {...} or null, "failure": null or {"kind", "message", "signal"}, "engines": [{"candidate",
"passport", "status", "stage", "share", "elapsed_s", "left_s", "seconds", "size_bytes", "failure", "folder"}]}.
'status' is 'queued', 'building', 'interrupted', 'failed' or 'ready'. An engine that is there is not built again; one
that failed or was interrupted is built again by `prepare`. `share` goes from 0 to 1, `left_s` is null where unknown.
"""

import json
import os
import sys
import time

from . import device_facts, engines, processes, trtexec
from .failures import Failure, of_exception
from .release import read_manifest

_SHOWN_LEFT_FROM = 0.05  # of a build must be done before its own pace tells anything


def main(argv, commands=None):
    """The command line without the program's name, of these commands' or of ours; returns the exit status."""
    try:
        answer = (commands or COMMANDS)[argv[0]](argv[1], argv[2:])
    except (Failure, OSError, ValueError) as error:
        failure = of_exception(error, "load").as_dict()
        answer = {"root": None, "facts": None, "failure": failure, "engines": []}
    sys.stdout.write(json.dumps(answer, sort_keys=True) + "\n")
    return 0


def prepare(release, names):
    """Queue what is missing of the engines of `release` (of these candidates, else of all) and start the builder."""
    manifest = read_manifest(release)
    root = engines.root_of(release, manifest)
    wanted = names or [c["name"] for c in manifest["candidates"] if c["runtime"] == "tensorrt"]
    tool = trtexec.find()
    facts = device_facts.describe(tool.version, tool.simulated)
    os.makedirs(root, exist_ok=True)
    engines.prune(root)
    rows, queued = [], False
    for name in wanted:
        job = engines.job_of(release, manifest, name)
        refused = _refusal(job, facts)
        if refused:
            rows.append(dict(row(name, None, {"status": "failed", "failure": refused})))
            continue
        engine = engines.Engine(root, engines.digest(engines.passport(job, facts)))
        with engines.asking(root):
            if engine.state()["status"] not in ("ready", "queued", "building"):
                _queue(engine, job, facts)
                queued = True
        rows.append(row(name, engine, engine.state()))
    if queued:
        processes.detach("engine_builder", [root])
    return {"root": root, "facts": facts, "failure": None, "engines": rows}


def status(root, names):
    """How far the engines with these passports are. Starts nothing."""
    rows = []
    for engine in (engines.Engine(root, name) for name in names):
        job = processes.read_json(engine.path("job.json")) or {"candidate": None}
        rows.append(row(job["candidate"], engine, engine.state()))
    return {"root": root, "facts": None, "failure": None, "engines": rows}


def ready(release, names):
    """The engines of candidates that would load. Failure for the first that would not."""
    manifest = read_manifest(release)
    tool = trtexec.find()
    facts = device_facts.describe(tool.version, tool.simulated)
    found = [engines.ready(release, manifest, name, facts)[1] for name in names]
    rows = [row(name, engine, engine.state()) for name, engine in zip(names, found)]
    return {"root": engines.root_of(release, manifest), "facts": facts, "failure": None, "engines": rows}


def _refusal(job, facts):
    """Why no build is begun, as {"kind", "message"}; None where one can be."""
    reason = trtexec.refusal(job["recipe"], job["opset"], facts)
    if reason:
        return {"kind": "recipe", "message": reason}
    reason = trtexec.memory_refusal(job["bytes"], *device_facts.available_mb())
    return {"kind": "memory", "message": reason} if reason else None


def _queue(engine, job, facts):
    os.makedirs(engine.folder, exist_ok=True)
    processes.write_json(engine.path("job.json"), job)
    processes.write_json(engine.path("passport.json"), engines.passport(job, facts))
    engine.write(status="queued", queued_at=time.monotonic())  # last: the builder takes what says so


def row(candidate, engine, state):
    """An engine in an answer."""
    building = state["status"] == "building"
    elapsed = time.monotonic() - state["started_at"] if building else None
    return {
        "candidate": candidate, "passport": engine.name if engine else None, "status": state["status"],
        "stage": state.get("stage") if building else None,
        "share": state["share"] if building else 1.0 if state["status"] == "ready" else 0.0,
        "elapsed_s": elapsed, "left_s": _left_s(state, elapsed) if building else None,
        "seconds": state.get("seconds"), "size_bytes": state.get("size_bytes"), "failure": state.get("failure"),
        "folder": engine.folder if engine else None,
    }  # fmt: skip


def _left_s(state, elapsed):
    """Seconds left: by the pace of this build once it tells, before by earlier builds on this device, else None."""
    if state["share"] >= _SHOWN_LEFT_FROM:
        return elapsed * (1 - state["share"]) / state["share"]
    return max(0.0, state["estimate_s"] - elapsed) if state["estimate_s"] else None


COMMANDS = {"prepare": prepare, "engines": status, "ready": ready}
