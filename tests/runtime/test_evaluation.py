from __future__ import annotations

import numpy as np
import pytest

from edgeopt.errors import DataError
from edgeopt.runtime.evaluation import input_digest, record, replay

BATCHES = [np.full((2, 3), i, np.float32) for i in range(4)]


def double(inputs):
    return {"y": inputs["x"] * 2}


def evaluate(predict):
    return {"mean": np.mean([predict({"x": x})["y"].mean() for x in BATCHES]), "count": len(BATCHES)}


def test_a_recording_replays_to_the_same_metrics():
    recording = record(evaluate, double)
    assert recording.metrics == {"mean": 3.0, "count": 4.0}
    assert recording.complete and len(recording.calls) == 4
    outputs = [double(call) for call in recording.calls]
    assert replay(evaluate, recording.calls, outputs) == recording.metrics
    worse = [{"y": out["y"] + 1} for out in outputs]
    assert replay(evaluate, recording.calls, worse)["mean"] == 4.0


def test_recorded_inputs_are_copies():
    x = np.zeros(3, np.float32)

    def reusing(predict):
        for value in (1, 2):
            x[:] = value
            predict({"x": x})
        return {"m": 1}

    calls = record(reusing, double).calls
    assert [call["x"][0] for call in calls] == [1, 2]


def test_an_evaluate_that_writes_into_outputs_does_not_change_them():
    def writing(predict):
        y = predict({"x": BATCHES[1]})["y"]
        y += 100
        return {"m": y.mean()}

    outputs = [{"y": BATCHES[1].copy()}]
    assert replay(writing, [{"x": BATCHES[1]}], outputs) == {"m": 101.0}
    assert replay(writing, [{"x": BATCHES[1]}], outputs) == {"m": 101.0}


def test_the_cap_leaves_an_incomplete_recording():
    recording = record(evaluate, double, most_bytes=50)  # a batch is 24 bytes
    assert len(recording.calls) == 2 and not recording.complete
    assert recording.metrics["count"] == 4


def asking(*inputs):
    def evaluate_(predict):
        for x in inputs:
            predict({"x": x})
        return {"m": 1.0}

    return evaluate_


OTHERS = {
    "fewer": (asking(BATCHES[0]), "asks for 1 of the 2"),
    "more": (asking(BATCHES[0], BATCHES[1], BATCHES[2]), "more than the 2"),
    "other order": (asking(BATCHES[1], BATCHES[0]), "input 0 is not"),
    "other value": (asking(BATCHES[0], BATCHES[1] + 1e-7), "input 1 is not"),
    "other dtype": (asking(BATCHES[0].astype(np.float64), BATCHES[1]), "input 0 is not"),
    "other shape": (asking(BATCHES[0].reshape(3, 2), BATCHES[1]), "input 0 is not"),
}


@pytest.mark.parametrize("other, said", OTHERS.values(), ids=OTHERS)
def test_an_evaluate_that_asks_for_anything_else_is_refused(other, said):
    calls = [{"x": BATCHES[0]}, {"x": BATCHES[1]}]
    with pytest.raises(DataError, match=said) as refused:
        replay(other, calls, [double(call) for call in calls])
    assert "not deterministic" in str(refused.value)


NO_METRICS = {
    "none": None, "number": 0.5, "empty": {}, "NaN": {"m": float("nan")}, "infinite": {"m": np.inf},
    "text": {"m": "good"}, "array": {"m": np.zeros(3)},
}  # fmt: skip


@pytest.mark.parametrize("value", NO_METRICS.values(), ids=NO_METRICS)
def test_metrics_are_finite_numbers_by_name(value):
    def odd(predict):
        predict({"x": BATCHES[0]})
        return value

    with pytest.raises(DataError, match="evaluate gave"):
        record(odd, double)


def test_an_evaluate_without_data_is_refused():
    with pytest.raises(DataError, match="never called predict"):
        record(lambda predict: {"accuracy": 1.0}, double)


def test_an_error_of_the_user_names_the_line(tmp_path):
    (tmp_path / "mine.py").write_text("def evaluate(predict):\n    return {'m': 1 / 0}\n")
    scope: dict = {}
    exec(compile((tmp_path / "mine.py").read_text(), str(tmp_path / "mine.py"), "exec"), scope)
    with pytest.raises(DataError, match=r"ZeroDivisionError(.|\n)*mine.py, line 2"):
        record(scope["evaluate"], double, base=tmp_path)


def test_the_digest_of_inputs_ignores_order_and_layout_only():
    a = np.arange(6.0).reshape(2, 3)
    same = input_digest({"a": a, "b": a + 1})
    assert input_digest({"b": a + 1, "a": np.asfortranarray(a)}) == same
    assert input_digest({"a": a.astype(">f8"), "b": a + 1}) == same
    assert input_digest({"b": a, "a": a + 1}) != same
