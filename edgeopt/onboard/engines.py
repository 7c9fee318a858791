"""Engines on this device, each under its passport: everything that it was made from and for.

    ROOT/engines/PASSPORT/passport.json, job.json, state.json, log, engine.plan
    ROOT/engines/timing/KEY.cache       kernel times that TensorRT keeps, one file for a GPU and TensorRT
    ROOT/engines/builder.lock           held by the one process that builds

The passport's sha256 names the folder, so an engine of another GPU, TensorRT or file is never found, let alone loaded.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time

from . import processes
from .failures import Failure

DEVICE_KEYS = ("gpu", "sm", "l4t", "cuda", "tensorrt", "simulated")
_WORDS = {"gpu": "the GPU", "sm": "the compute capability", "l4t": "L4T", "cuda": "CUDA", "tensorrt": "TensorRT",
          "simulated": "the stand-in"}  # fmt: skip
ASK = "run 'edgeopt prepare ARTIFACT HOST'"
_STARTING_S = 30  # a queued engine for which nobody works after so long was left behind


def root_of(folder, manifest):
    """ROOT/engines of a release at ROOT/NAME/releases/DIGEST, else of the manifest's root or ~/.edgeopt."""
    parts = os.path.realpath(folder).split(os.sep)
    if len(parts) > 3 and parts[-2] == "releases":
        return os.path.join(os.sep.join(parts[:-3]), "engines")
    return os.path.join(os.path.expanduser(manifest.get("root") or "~/.edgeopt"), "engines")


def job_of(folder, manifest, name):
    """What the engine of candidate `name` is built from: paths on this device, and the recipe. Failure without one."""
    candidates = [c for c in manifest["candidates"] if c["name"] == name]
    recipes = [r for r in manifest.get("engine_recipes", []) if r["candidate"] == name]
    if not candidates or not recipes:
        raise Failure("missing-runtime", "the artifact has no recipe for an engine of %s: build it again" % name)
    recipe = recipes[0]
    file = recipe.get("onnx") or candidates[0]["file"]

    def path(name):
        return os.path.join(os.path.realpath(folder), name)

    made_of = [f for f in manifest["files"] if f == file or f.startswith(file + ".")]  # its external data too
    return {
        "candidate": name, "onnx": path(file), "opset": candidates[0].get("opset"), "recipe": recipe,
        "plugins": [path(p) for p in recipe.get("plugins", [])],
        "calibration": path(recipe["calibration"]) if recipe.get("calibration") else None,
        "bytes": sum(manifest["files"][f]["size"] for f in made_of),
        "sha256": {
            "onnx": [manifest["files"][f]["sha256"] for f in sorted(made_of)],
            "plugins": [manifest["files"][p]["sha256"] for p in recipe.get("plugins", [])],
            "calibration": manifest["files"][recipe["calibration"]]["sha256"] if recipe.get("calibration") else None,
        },
    }  # fmt: skip


def passport(job, facts):
    """The passport of the engine of `job` on a device of these facts."""
    recipe = job["recipe"]
    made_from = {
        "onnx": job["sha256"]["onnx"], "plugins": job["sha256"]["plugins"], "calibration": job["sha256"]["calibration"],
        "typing": recipe["typing"], "flags": recipe["flags"], "shapes": recipe["shapes"],
        "dla": bool(recipe.get("dla")),
    }  # fmt: skip
    return {"made_from": made_from, "device": {key: facts[key] for key in DEVICE_KEYS}}


def digest(value):
    """sha256 of a value as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def difference(made, now):
    """What of the device has changed since an engine was made: 'TensorRT was 8.5.2 and is 8.6.1'."""
    changed = [key for key in DEVICE_KEYS if made[key] != now[key]]
    return ", ".join("%s was %s and is %s" % (_WORDS[key], made[key], now[key]) for key in changed)


class Engine:
    """The folder of one engine below `root`, named by the digest of its passport."""

    def __init__(self, root, name):
        self.name = name
        self.root = root
        self.folder = os.path.join(root, name)
        self.plan = self.path("engine.plan")

    def path(self, file):
        return os.path.join(self.folder, file)

    def state(self):
        """{"status", ...}: 'absent', 'queued', 'building', 'interrupted', 'failed' or 'ready'."""
        state = processes.read_json(self.path("state.json"))
        if state is None:
            return {"status": "absent"}
        if state["status"] == "building" and not processes.is_alive(state["process"]):
            # its builder may have written its last word since
            state = processes.read_json(self.path("state.json")) or state
            return dict(state, status="interrupted") if state["status"] == "building" else state
        if state["status"] == "queued" and self._left_behind(state):
            return dict(state, status="interrupted")
        if state["status"] == "ready" and _size(self.plan) != state["size_bytes"]:
            return {"status": "absent"}
        return state

    def write(self, **state):
        processes.write_json(self.path("state.json"), state)

    def _left_behind(self, state):
        waited = time.monotonic() - state["queued_at"]
        return not is_locked(self.root) and not 0 <= waited < _STARTING_S


def ready(folder, manifest, name, facts):
    """(job, Engine) of a candidate whose engine is built for this device; else Failure in one sentence."""
    job = job_of(folder, manifest, name)
    wanted = passport(job, facts)
    engine = Engine(root_of(folder, manifest), digest(wanted))
    state = engine.state()
    if state["status"] == "ready":
        return job, engine
    raise Failure("missing-runtime", _why_not(engine, wanted, state))


def every(root):
    """The engines below `root` that have a passport."""
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    return [Engine(root, n) for n in names if os.path.isfile(os.path.join(root, n, "passport.json"))]


def lock_of(root):
    """The file that the builder locks; an artifact that is called 'engines' has a `lock` of its own there."""
    return os.path.join(root, "builder.lock")


def is_locked(root):
    """Whether a process builds there."""
    try:
        with open(lock_of(root), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def asking(root):
    """A block in which nobody else looks whether an engine is there and queues it."""
    with open(os.path.join(root, "ask"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prune(root):
    """Remove engines whose file no release on this device has any more."""
    blobs = os.path.join(os.path.dirname(root), "blobs", "sha256")
    if not os.path.isdir(blobs):
        return
    for engine in every(root):
        held = (processes.read_json(engine.path("passport.json")) or {}).get("made_from", {}).get("onnx", [])
        here = all(os.path.isfile(os.path.join(blobs, sha256[:2], sha256)) for sha256 in held)
        if held and not here and engine.state()["status"] not in ("queued", "building"):
            shutil.rmtree(engine.folder, ignore_errors=True)


def _why_not(engine, wanted, state):
    if state["status"] in ("queued", "building"):
        return "its engine is being built, %.0f %% are done: %s" % (100 * state.get("share", 0.0), ASK)
    if state["status"] == "failed":
        return "its engine could not be built: %s; to try again %s" % (state["failure"]["message"], ASK)
    for other in every(engine.root):
        made = processes.read_json(other.path("passport.json")) or {}
        if other.name != engine.name and made.get("made_from") == wanted["made_from"] and os.path.isfile(other.plan):
            return "its engine was built for another device or software: %s; %s" % (
                difference(made["device"], wanted["device"]), ASK,
            )  # fmt: skip
    return "its engine is not built on this device: %s" % ASK


def _size(path):
    try:
        return os.path.getsize(path)
    except OSError:
        return None
