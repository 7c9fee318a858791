"""The process that builds engines, one after the other: detached from who asked, one at a time on a device.

It takes what is queued below ROOT/engines until nothing is left. What it does is written to each engine's state.json,
replaced as a whole, so that anybody can ask at any time, and a build that was killed is told from one that runs.
"""

import collections
import contextlib
import errno
import fcntl
import os
import select
import subprocess
import time

from . import build_times, device_facts, engines, processes, trtexec, trtexec_log
from .failures import Failure

_KEPT_LINES = 400  # of the log, in which the reason of a failure is looked for
_PART = "engine.plan.part"
_WRITE_S = 0.5  # between two writings of the state


def main(argv):
    """argv: [ROOT/engines]. Waits for the one that builds already, then builds what is queued."""
    root = argv[0]
    with open(engines.lock_of(root), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while True:
            engine = _next(root)
            if engine is None:
                return
            _build_or_fail(engine)


def _next(root):
    queued = [(e.state(), e) for e in engines.every(root)]
    queued = [(state["queued_at"], e.name, e) for state, e in queued if state["status"] in ("queued",)]
    return min(queued)[2] if queued else None


def _build_or_fail(engine):
    try:
        _build(engine)
    except Failure as failure:
        _fail(engine, failure.kind, failure.message)
    except Exception as error:  # whatever it is, the next one must get its turn
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        said = "the disk of the device is full: free space and ask again"
        _fail(engine, "space" if full else "build", said if full else "%s: %s" % (type(error).__name__, error))


def _build(engine):
    job = processes.read_json(engine.path("job.json"))
    state = {
        "status": "building", "process": processes.this_process(), "started_at": time.monotonic(), "share": 0.0,
        "stage": "starting", "estimate_s": build_times.estimate_s(engine.root, job),
    }  # fmt: skip
    engine.write(**state)
    tool = trtexec.find()
    if not os.path.isfile(job["onnx"]):
        raise Failure("load", "the release that the engine was asked for is gone: push it again")
    job = dict(job, calibration=_calibration(engine, job, tool))
    argv = trtexec.build_argv(
        tool, job, job["onnx"], engine.path(_PART), _timing_cache(engine), _workspace(job)
    )  # fmt: skip
    status, lines = _run(engine, argv, state)
    if status != 0 or not _finished(engine):
        with contextlib.suppress(OSError):
            os.unlink(engine.path(_PART))
        return _fail(engine, *trtexec_log.failure(lines, status))
    os.replace(engine.path(_PART), engine.plan)
    seconds = time.monotonic() - state["started_at"]
    build_times.remember(engine.root, job, seconds)
    return engine.write(
        status="ready", seconds=seconds, size_bytes=os.path.getsize(engine.plan), argv=argv, simulated=tool.simulated
    )


def _run(engine, argv, state):
    """(exit status, last lines) of trtexec; its log, without what --verbose adds, lies beside the engine."""
    progress = trtexec_log.Progress()
    lines, written, shown = collections.deque(maxlen=_KEPT_LINES), time.monotonic(), ""
    with open(engine.path("log"), "wb") as log:
        log.write((" ".join(argv) + "\n").encode())
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=engine.folder,
            preexec_fn=processes.die_with_parent,
        )  # fmt: skip
        for raw in _lines(process.stdout):
            line = raw.decode("utf-8", "replace")
            progress.feed(line)
            if raw and not trtexec_log.is_verbose(line):
                log.write(raw)
                log.flush()
                lines.append(line)
            if time.monotonic() - written > _WRITE_S or (not raw and progress.stage != shown):
                engine.write(**dict(state, share=progress.share, stage=progress.stage))
                written, shown = time.monotonic(), progress.stage
        return process.wait(), list(lines)


def _lines(pipe):
    """Each line that comes out of a pipe, and an empty one where nothing came for a while."""
    held = b""
    while True:
        if not select.select([pipe], [], [], _WRITE_S)[0]:
            yield b""
            continue
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            break
        *whole, held = (held + data).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if held:
        yield held


def _finished(engine):
    """Whether the engine's file is there and holds something; it is on the disk before it gets its name."""
    try:
        with open(engine.path(_PART), "rb+") as f:
            os.fsync(f.fileno())
            return os.fstat(f.fileno()).st_size > 0
    except OSError:
        return False


def _workspace(job):
    """MiB of workspace that the free memory allows. Failure of kind 'memory' where it allows no build."""
    available, swap = device_facts.available_mb()
    reason = trtexec.memory_refusal(job["bytes"], available, swap)
    if reason:
        raise Failure("memory", reason)
    own = device_facts.gpu_free_mb()
    return trtexec.workspace_mb(job["bytes"], available if own is None else own)


def _calibration(engine, job, tool):
    """The calibration file under the number of the TensorRT that reads it, which its first line holds; or None."""
    if not job["calibration"]:
        return None
    with open(job["calibration"], encoding="utf-8") as f:
        text = f.read()
    path = engine.path("calibration")
    with open(path, "w", encoding="utf-8") as f:
        f.write(trtexec.renumbered(text, tool.version))
    return path


def _timing_cache(engine):
    """TensorRT refuses or forgets kernel times of another GPU or version: each has a file of its own."""
    device = processes.read_json(engine.path("passport.json"))["device"]
    folder = os.path.join(engine.root, "timing")
    os.makedirs(folder, exist_ok=True)
    key = {name: device[name] for name in ("gpu", "sm", "cuda", "tensorrt", "simulated")}
    return os.path.join(folder, engines.digest(key)[:16] + ".cache")


def _fail(engine, kind, message):
    with contextlib.suppress(OSError):  # a full disk: the state stays 'building' of a process that ended
        engine.write(status="failed", failure={"kind": kind, "message": message})
