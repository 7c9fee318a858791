"""The host's side of the runner: one request to the device, its response and raw outputs back.

The request and the outputs lie in a temporary folder on the device, which is removed whatever happens.
Candidates that fail are part of the answer (`Run.failure`); what raises is a device that cannot run the
runner at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import posixpath
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from edgeopt.device import scratch as scratch_place
from edgeopt.device.response import MAX_RESPONSE_BYTES, check_response, outputs_of
from edgeopt.errors import DeviceError, EdgeoptError, LockedError, SpaceError
from edgeopt.ports.connection import Connection, Result
from edgeopt.progress import SILENT, Progress, log
from edgeopt.runtime import tensors, zipapp
from edgeopt.spec import json_file
from edgeopt.spec.manifest import Candidate, TensorRef, TensorSpec
from edgeopt.spec.values import Value, validate

PROTOCOL = 1
_READ_S = 10
LOCK_WAIT_S = (1, 900)  # for another measurement: until it is said, and then until it is given up

Watch = Callable[[dict[str, Any]], None]
Refs = Mapping[str, TensorRef]


@dataclass(frozen=True)
class Timing:
    """How to measure: `rounds` in turns across candidates, each `calls` after `warmup`; `max_s` a candidate.

    `mode` 'throughput' keeps `streams` programs of a candidate busy at once (None: as many as are best) and gives
    seconds / answers. `tune`: the candidates whose threads, spinning and streams are found by trial. `repeats`: rounds
    in which others used the machine that may be done again. `lock`: another file than the machine's own.
    `duration_s`: a soak that goes on for so long, whatever `rounds` says.
    """

    feed: str
    rounds: int = 5
    calls: int = 50
    warmup: int = 10
    max_s: float = 20
    mode: Literal["latency", "throughput"] = "latency"
    streams: int | None = None
    tune: tuple[str, ...] = ()
    repeats: int = 2
    lock: str | None = None
    duration_s: float | None = None


@dataclass(frozen=True)
class Sensors:
    """What to sample meanwhile, see onboard/sample.py. `root`: where /sys is looked for; `sudo`: `sudo -n tegrastats`.

    Where power can be read, the device is watched for `idle_s` first and each round lasts for `round_s` at least.
    """

    interval_s: float = 0.1
    sudo: bool = False
    root: str = "/"
    round_s: float = 1.0
    idle_s: float = 1.0


@dataclass(frozen=True)
class Request:
    """What the runner is asked. File names are relative to `folder`, a path on the device.

    `feeds`: id -> input name -> where it lies. `timeout_s` is the longest that one candidate may be silent
    (loading, or within one call); `total_s` ends the whole. `memory_bytes`: what a candidate may hold, None for all
    that the machine can spare.
    """

    folder: str
    candidates: Sequence[Candidate]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    feeds: Mapping[str, Refs]
    op_libraries: Sequence[str] = ()
    timing: Timing | None = None
    threads: int | None = None
    timeout_s: float = 300
    total_s: float = 3600
    memory_bytes: int | None = None
    sensors: Sensors | None = None


class Failure(Value):
    """Why a candidate gave no figures; `signal` is the one that ended its process."""

    kind: Literal["missing-runtime", "load", "run", "abort", "timeout", "memory", "space", "request", "locked"]
    message: str
    signal: int | None = None


class Run(Value):
    """What the runner has of one candidate. Seconds; `rounds_s` holds every measured call of each round."""

    status: Literal["ok", "failed"]
    failure: Failure | None
    flags: tuple[dict[str, Any], ...]
    load_s: float | None
    first_call_s: float | None
    rounds_s: tuple[tuple[float, ...], ...]
    peak_rss_bytes: int | None
    outputs: dict[str, dict[str, TensorRef]]
    warm_up: dict[str, Any] | None = None
    setting: dict[str, Any] | None = None  # {"threads", "streams", "flags"} where it was tuned
    tried: tuple[dict[str, Any], ...] = ()  # settings with their "ms", None and "failure" where one gave none
    windows: tuple[tuple[float, float, float] | None, ...] = ()  # of each round: from, to, calls
    gpu_bytes: int | None = None  # the most that its runtime's allocator took of the GPU's memory

    @property
    def calls_s(self) -> list[float]:
        """Every measured call of all rounds."""
        return [seconds for calls in self.rounds_s for seconds in calls]


class _Answer(Value):
    protocol: Literal[1]
    environment: dict[str, Any]
    failure: Failure | None
    candidates: dict[str, Run]
    noise: dict[str, Any] | None = None
    sensors: dict[str, Any] | None = None


@dataclass(frozen=True)
class Response:
    """The device's answer: facts of the device, a Run for each candidate, and its outputs in `folder` here.

    `noise`: what else the machine did, see onboard/run.py; None where nothing was timed or the runner is an older one.
    `sensors`: what was sampled, see onboard/sample.py, and all rounds; None where none were asked for, or likewise.
    """

    environment: dict[str, Any]
    runs: dict[str, Run]
    folder: Path
    noise: dict[str, Any] | None = None
    sensors: dict[str, Any] | None = None

    def outputs(self, candidate: str, feed: str) -> dict[str, np.ndarray]:
        """The outputs of one feed by name (bfloat16 as float32) of a candidate that did not fail."""
        refs = outputs_of(self.runs[candidate], candidate, feed)
        return {name: tensors.read(self.folder, ref) for name, ref in refs.items()}


def environment(connection: Connection, *, python: str = "python3", timeout_s: float = 60) -> dict[str, Any]:
    """Facts of the device: Python, machine, CPU, memory, and the versions of the runtimes that it has."""
    with scratch_folder(connection) as scratch:
        runner = _put_runner(connection, scratch)
        done = connection.run([python, runner, "environment"], timeout_s=timeout_s, check=False)
        _check_status(done, connection, python)
        return _json(done.stdout, connection.label)


def measure(
    connection: Connection,
    request: Request,
    into: Path,
    *,
    runner: str | None = None,
    python: str = "python3",
    progress: Progress = SILENT,
    watch: Watch | None = None,
) -> Response:
    """Have the device run and measure the candidates of `request`, and fetch the raw outputs into `into`.

    `runner` is the onboard.pyz on the device; without it this edgeopt's own is sent along. `python` is an
    interpreter there, 3.6 or newer, that has the candidates' runtimes. `watch` is called after each round, from
    another thread, with what onboard/turns.py says of it. An older runner, which refuses what it does not know,
    measures without sensors and is not watched.
    Another measurement that goes on there is waited for, `LOCK_WAIT_S` at most. Raises DeviceError where there is no
    such Python, the request is refused or nothing comes back in time; LockedError, with the other's process, where it
    did not end; SpaceError where the device's disk is full; what the connection raises where it breaks.
    """
    with scratch_folder(connection, beside=request.folder) as scratch:
        runner = runner or _put_runner(connection, scratch)
        argv = [python, runner, "run", f"{scratch}/request.json", f"{scratch}/response.json"]
        waits = list(LOCK_WAIT_S)
        soaks = bool(request.timing and request.timing.duration_s)  # hours that nobody waits for any more must end
        while waits:
            encoded = _encode(request, f"{scratch}/out", waits[0], watched=watch is not None or soaks)
            _put_json(connection, f"{scratch}/request.json", encoded)
            with progress.bar(f"measuring on {connection.label}", None), _lines_to(watch, soaks) as sink:
                # the runner ends by itself at total_s; the minute is for starting it and writing the response
                done = connection.run(argv, stdout=sink, timeout_s=request.total_s + waits[0] + 60, check=False)
            _check_status(done, connection, python)
            answer = _fetch_answer(connection, scratch, into)
            if _is_older(answer) and (request.sensors or watch) and not soaks:
                log.info("%s: the artifact's runner is an older one and samples no sensors", connection.label)
                request, watch = dataclasses.replace(request, sensors=None), None
                continue
            if answer.failure is None or answer.failure.kind != "locked":
                break
            if waits.pop(0) != LOCK_WAIT_S[-1]:
                most = LOCK_WAIT_S[-1]
                log.warning("%s: %s; waiting for up to %g s", connection.label, answer.failure.message, most)
        _check_answer(answer, connection.label)
        check_response(answer.candidates, answer.noise, request.candidates, connection.label)
        _fetch_outputs(connection, scratch, answer, into, progress)
    return Response(answer.environment, answer.candidates, into, answer.noise, answer.sensors)


def _is_older(answer: _Answer) -> bool:
    """Whether the runner refused the request for a key that runners of before the sensors do not know."""
    said = answer.failure.message if answer.failure else ""
    return said in ("unknown key 'sensors'", "unknown key 'progress'")


@contextlib.contextmanager
def _lines_to(watch: Watch | None, soaks: bool) -> Iterator[BinaryIO | None]:
    """A file whose lines `watch` gets, read by a thread: a command's output goes there while it runs."""
    if watch is None and not soaks:
        yield None
        return
    reading, writing = os.pipe()

    def read() -> None:
        told = watch
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    said = json.loads(line)
                    if told is not None:
                        told(said)
                except ValueError:  # what a runtime printed there is nothing to us
                    continue
                except Exception as why:  # the lines must be taken all the same, or the runner would wait for ever
                    log.warning("the rounds are not shown any more: %s: %s", type(why).__name__, why)
                    told = None

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        with open(writing, "wb", buffering=0) as sink:
            yield sink
    finally:
        thread.join(timeout=_READ_S)  # a process of a runtime's own may hold the other end open


def _encode(request: Request, out: str, lock_wait_s: float, *, watched: bool = False) -> dict[str, Any]:
    encoded = {
        "protocol": PROTOCOL,
        "folder": request.folder,
        "out": out,
        "candidates": [c.model_dump(mode="json") for c in request.candidates],
        "inputs": [spec.model_dump(mode="json") for spec in request.inputs],
        "outputs": [spec.model_dump(mode="json") for spec in request.outputs],
        "op_libraries": list(request.op_libraries),
        "feeds": [
            {"id": name, "inputs": {key: ref.model_dump(mode="json") for key, ref in refs.items()}}
            for name, refs in request.feeds.items()
        ],
        "measure": None if request.timing is None else _encode_timing(request.timing, lock_wait_s),
        "threads": request.threads,
        "timeout_s": request.timeout_s,
        "total_s": request.total_s,
    }
    # keys that an older artifact's runner does not know, which it would refuse
    sensors = request.sensors and {**vars(request.sensors), "sudo": int(request.sensors.sudo)}
    newer = {"memory_bytes": request.memory_bytes, "sensors": sensors, "progress": "stdout" if watched else None}
    return encoded | {key: value for key, value in newer.items() if value is not None}


def _encode_timing(timing: Timing, lock_wait_s: float) -> dict[str, Any]:
    encoded = {**vars(timing), "lock_wait_s": lock_wait_s}
    return {key: value for key, value in encoded.items() if key != "duration_s" or value is not None}


@contextlib.contextmanager
def scratch_folder(connection: Connection, *, beside: str = "") -> Iterator[str]:
    """A temporary folder on the device with an empty `out` in it, removed at the end.

    Where /tmp has no room it lies near the release `beside`.
    """
    near = posixpath.dirname(posixpath.dirname(beside)) if connection.remote else ""
    made = connection.run(scratch_place.make(near), check=False)
    if made.status != 0:
        raise _disk_or_device(made, "cannot make a temporary folder", connection)
    scratch = made.text
    try:
        connection.run(["mkdir", f"{scratch}/out"])
        yield scratch
    finally:
        # a broken connection has its own error, which this one would hide
        with contextlib.suppress(EdgeoptError):
            connection.run(["rm", "-rf", "--", scratch], check=False)


def _put_runner(connection: Connection, scratch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        connection.put(zipapp.write_zipapp(folder), f"{scratch}/{zipapp.FILE_NAME}")
    return f"{scratch}/{zipapp.FILE_NAME}"


def _put_json(connection: Connection, path: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "request.json"
        local.write_text(json.dumps(value))
        connection.put(local, path)


def _check_status(done: Result, connection: Connection, python: str) -> None:
    if done.status == 0:
        return
    if done.status == 127:
        raise DeviceError(
            f"there is no '{python}'",
            where=connection.label,
            todo="install Python 3.6 or newer, or name it with --python",
        )
    if done.status == errno.ENOSPC:
        raise _disk_or_device(done, "the runner cannot write its response", connection, full=True)
    raise _disk_or_device(done, "the runner ended without a response", connection)


def _disk_or_device(done: Result, what: str, connection: Connection, *, full: bool = False) -> EdgeoptError:
    if full or "no space left" in done.complaint.lower():
        return SpaceError(
            f"the device's disk is full: {done.complaint}",
            where=connection.label,
            todo="free space there and try again",
        )
    return DeviceError(
        f"{what}: {done.complaint}",
        where=connection.label,
        todo="run 'python3 onboard.pyz environment' there by hand",
    )


def _fetch_answer(connection: Connection, scratch: str, into: Path) -> _Answer:
    into.mkdir(parents=True, exist_ok=True)
    local = into / "response.json"
    connection.get(f"{scratch}/response.json", local, at_most=MAX_RESPONSE_BYTES)
    return read_answer(local.read_bytes(), connection.label)


def read_answer(data: bytes, label: str) -> _Answer:
    """response.json, checked in itself."""
    return validate(_Answer, _json(data, label), source=f"{label}: the runner's response", error=DeviceError)


def _check_answer(answer: _Answer, label: str) -> None:
    """Raise where the runner did nothing: another measurement did not end, or the request is refused."""
    if answer.failure is None:
        return
    if answer.failure.kind == "locked":
        todo = "wait for it to end; the lock goes with its process"
        raise LockedError(answer.failure.message, where=label, todo=todo)
    raise DeviceError(
        f"the runner refuses the request: {answer.failure.message}", where=label,
        todo="push the artifact again: its runner and this edgeopt may differ in version",
    )  # fmt: skip


def _fetch_outputs(connection: Connection, scratch: str, answer: _Answer, into: Path, progress: Progress) -> None:
    """Fetch the files that the outputs of whole runs lie in; those of a failed one may be cut off anywhere."""
    whole = [run for run in answer.candidates.values() if run.failure is None]
    refs = [ref for run in whole for out in run.outputs.values() for ref in out.values()]
    ends: dict[str, int] = {}
    for ref in refs:
        ends[ref.file] = max(ends.get(ref.file, 0), ref.offset + ref.size_bytes)
    size = sum(ref.size_bytes for ref in refs)
    with progress.bar("fetching outputs", size, unit="bytes") as advance:
        for file, most in sorted(ends.items()):
            connection.get(f"{scratch}/out/{file}", into / Path(file).name, advance=advance, at_most=most)


def _json(data: bytes, label: str) -> dict[str, Any]:
    todo = "try again with --debug"
    value = json_file.read(data, what="the runner's answer", source=label, error=DeviceError, todo=todo)
    if not isinstance(value, dict):
        raise DeviceError("the runner's answer is not a JSON object", where=label, todo="try again with --debug")
    return value
