"""Engines that another device of an equal passport has built: which are wanted, how one is given away and taken in.

    python3 onboard.pyz passports RELEASE [CANDIDATE ...]   as `prepare` answers, but nothing is started
    python3 onboard.pyz engine RELEASE CANDIDATE            the same, of one that is ready, with its "sha256"
    python3 onboard.pyz adopt RELEASE CANDIDATE FILE SHA256 SECONDS
                                                            the same, after FILE has become the candidate's engine

FILE is taken in where its sha256 is that and trtexec loads and runs it once; else it is removed, and the answer has the
failure. An engine that is there already is left as it is. SECONDS: what its build took.
"""

import contextlib
import hashlib
import os

from . import device_facts, engines, prepare, processes, trt_measured, trtexec
from .failures import Failure, of_exception
from .release import read_manifest


def passports(release, names):
    """The engines that the candidates of `release` (these, or all) want on this device, as they are now."""
    manifest = read_manifest(release)
    root = engines.root_of(release, manifest)
    _, facts = _device()
    rows = []
    for name in names or [c["name"] for c in manifest["candidates"] if c["runtime"] == "tensorrt"]:
        engine = engines.Engine(root, engines.digest(engines.passport(engines.job_of(release, manifest, name), facts)))
        rows.append(prepare.row(name, engine, engine.state()))
    return _answer(root, facts, rows)


def engine(release, names):
    """The engine of one candidate with the sha256 of its file. Failure where it is not ready."""
    manifest = read_manifest(release)
    _, facts = _device()
    found = engines.ready(release, manifest, names[0], facts)[1]
    row = dict(prepare.row(names[0], found, found.state()), sha256=_sha256(found.plan))
    return _answer(found.root, facts, [row])


def adopt(release, argv):
    """Make a file the engine of a candidate, proven by its sha256 and by running it."""
    name, path, sha256, seconds = argv
    manifest = read_manifest(release)
    tool, facts = _device()
    job = engines.job_of(release, manifest, name)
    wanted = engines.passport(job, facts)
    found = engines.Engine(engines.root_of(release, manifest), engines.digest(wanted))
    os.makedirs(found.root, exist_ok=True)
    failure = None
    try:
        with engines.asking(found.root):  # nobody queues it while it is tried
            if found.state()["status"] not in ("ready", "queued", "building"):
                _take_in(found, tool, job, wanted, path, sha256, float(seconds))
    except (Failure, OSError, ValueError) as error:
        failure = of_exception(error, "load").as_dict()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return dict(_answer(found.root, facts, [prepare.row(name, found, found.state())]), failure=failure)


def _take_in(found, tool, job, wanted, path, sha256, seconds):
    if _sha256(path) != sha256:
        raise Failure("load", "the engine's file did not arrive as it was sent")
    os.makedirs(found.folder, exist_ok=True)
    processes.write_json(found.path("job.json"), job)
    processes.write_json(found.path("passport.json"), wanted)
    os.replace(path, found.plan)
    try:
        program = trt_measured.Program(tool, job, found, [], [])
        try:
            program.prove()
        finally:
            program.close()
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(found.plan)
        raise
    size = os.path.getsize(found.plan)
    found.write(status="ready", seconds=seconds, size_bytes=size, argv=[], simulated=tool.simulated, sha256=sha256)


def _device():
    tool = trtexec.find()
    return tool, device_facts.describe(tool.version, tool.simulated)


def _answer(root, facts, rows):
    return {"root": root, "facts": facts, "failure": None, "engines": rows}


def _sha256(path):
    found = hashlib.sha256()
    with open(path, "rb") as f:
        for piece in iter(lambda: f.read(1 << 20), b""):
            found.update(piece)
    return found.hexdigest()


COMMANDS = {"passports": passports, "engine": engine, "adopt": adopt}
