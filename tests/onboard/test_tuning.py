"""Which settings are tried, which is taken, and that what was found reaches the application."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest

import edgeopt
from edgeopt import onboard
from edgeopt.onboard import machine, timing, tuning
from tests.tiny import expected, tiny_artifact

ORT = {"name": "a", "runtime": "onnxruntime", "flags": {}}
TORCH = {"name": "b", "runtime": "torchscript", "flags": {}}
EIGHT = {"all": 8, "physical": 4}


def short(settings) -> list[tuple]:
    return [(s["threads"], s["streams"], s["flags"].get("allow_spinning")) for s in settings]


SETTINGS = {
    "onnxruntime": (
        (ORT, "latency", EIGHT), {},
        [(1, 1, None), (2, 1, False), (2, 1, True), (4, 1, False), (4, 1, True), (8, 1, False), (8, 1, True)],
    ),
    "one core": ((ORT, "latency", {"all": 1, "physical": 1}), {}, [(1, 1, None)]),
    "torch does not spin by a setting": (
        (TORCH, "latency", {"all": 2, "physical": 1}), {}, [(1, 1, None), (2, 1, None)],
    ),
    "threads of the request stay": ((ORT, "latency", EIGHT), {"threads": 3}, [(3, 1, False), (3, 1, True)]),
    "threads of the flags stay": (
        ({**ORT, "flags": {"intra_op_threads": 2, "allow_spinning": True}}, "latency", EIGHT), {}, [(2, 1, None)],
    ),
    "an open number of threads does not": (
        ({**TORCH, "flags": {"intra_op_threads": None}}, "latency", {"all": 2, "physical": 2}), {},
        [(1, 1, None), (2, 1, None)],
    ),
    "throughput shares the cores": (
        (ORT, "throughput", EIGHT), {}, [(8, 1, None), (4, 2, False), (2, 4, False), (1, 8, False)],
    ),
    "streams of the profile stay": ((TORCH, "throughput", EIGHT), {"streams": 2}, [(4, 2, None)]),
    "a GPU has none": (
        ({**ORT, "flags": {"providers": ["CUDAExecutionProvider"]}}, "latency", EIGHT), {}, [(None, 1, None)],
    ),
    "an engine has none": (({**ORT, "runtime": "tensorrt"}, "latency", EIGHT), {}, [(None, 1, None)]),
}  # fmt: skip


@pytest.mark.parametrize("given, fixed, wanted", SETTINGS.values(), ids=SETTINGS)
def test_the_settings_that_are_tried(given, fixed, wanted):
    assert short(tuning.settings(*given, **fixed)) == wanted


def test_of_equal_settings_the_one_that_takes_least_is_taken():
    assert tuning.best([1.02, 1.0, 5.0]) == 0
    assert tuning.best([1.2, 1.0, 1.0]) == 1
    assert tuning.best([None, 3.0, 1.0]) == 2
    assert tuning.best([None, None]) == 0


def with_settings(artifact, **settings):
    found = {"candidate": "onnxruntime-fp32", "settings": {"threads": 1, "streams": 1, "flags": {}, **settings}}
    (artifact.folder / "selection.json").write_text(json.dumps(found))


def test_a_loaded_model_runs_with_what_was_found_here_and_not_with_what_was_found_elsewhere(tmp_path):
    artifact = tiny_artifact(tmp_path, torchscript=False)
    here = machine.cores()["all"]
    flags = {"flag": "allow_spinning", "value": False, "status": "applied", "message": ""}
    for cores, threads, records in ((here, None, [flags]), (here + 1, None, []), (here, 1, [])):
        with_settings(artifact, cores=cores, flags={"allow_spinning": False})
        with onboard.load(artifact.folder, threads=threads) as model:
            assert model.flags == records
            x = np.ones((1, 4), np.float32)
            np.testing.assert_allclose(model.predict({"x": x}), expected(x), rtol=1e-5)
    (artifact.folder / "selection.json").unlink()
    with edgeopt.load(artifact.folder) as model:
        assert model.flags == []


class Clock:
    """A clock that a call moves by the next of `seconds`, so that nothing depends on this machine's load."""

    def __init__(self, seconds):
        self._seconds, self._now = iter(seconds), 0.0

    def call(self):
        self._now += next(self._seconds)

    def __call__(self) -> float:
        return self._now


def warm_up(seconds, limit_s: float) -> dict:
    clock = Clock(seconds)
    return timing.warm_up(clock.call, limit_s, clock)


def test_a_warm_up_ends_when_it_no_longer_gets_faster():
    assert warm_up([5.0] * 5 + [3.0] * 5 + [1.0] * 5 + [0.98] * 5, 1e9) == {
        "calls": 20, "seconds": pytest.approx(49.9), "stable": True,
    }  # fmt: skip
    assert warm_up([1.0] * 5 + [2.0] * 5, 1e9)["calls"] == 10  # slower is no reason to go on


def test_a_warm_up_is_bounded_in_calls_and_in_seconds():
    faster = [0.9**i for i in range(100) for _ in range(timing.WINDOW)]
    assert warm_up(faster, 1e9) == {
        "calls": timing.MOST_WARM_UP,
        "seconds": pytest.approx(49.3, abs=0.1),
        "stable": False,
    }
    short = warm_up(faster, 12.0)
    assert not short["stable"] and 12 <= short["seconds"] < 13


def test_streams_are_called_at_once_in_threads_of_their_own():
    """Each call waits until all four are there: one after the other none would ever end."""
    barrier, threads = threading.Barrier(4), set()

    def call():
        threads.add(threading.get_ident())
        with contextlib.suppress(threading.BrokenBarrierError):  # the others are done
            barrier.wait(10 if len(threads) < 4 else 0.5)

    seconds = timing.seconds_a_call([call] * 4, 3, 60)
    assert len(threads) == 4 and threading.get_ident() not in threads
    assert 0 < seconds < 10


def test_a_stream_that_fails_fails_the_measurement():
    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        timing.seconds_a_call([lambda: timing.time.sleep(0.01), fail], 5, 10)


def test_torchs_threads_are_those_of_before_when_the_model_is_closed(tmp_path):
    import torch

    artifact = tiny_artifact(tmp_path)
    before = torch.get_num_threads()
    found = {"candidate": "torchscript-fp32", "settings": {"cores": machine.cores()["all"], "flags": {}}}
    found["settings"]["threads"] = before + 1
    (artifact.folder / "selection.json").write_text(json.dumps(found))
    with onboard.load(artifact.folder) as model:
        assert model.candidate == "torchscript-fp32" and torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
