"""What evaluate may say of a metric, and the interval that follows, or none where none can be told."""

from __future__ import annotations

import numpy as np
import pytest

from edgeopt.errors import DataError
from edgeopt.runtime import metrics
from edgeopt.runtime.evaluation import record, replayed


def interval(value, asked: int, other: float | None = None):
    found = metrics.intervals(metrics.read({"m": value}, asked), asked, {} if other is None else {"m": other})
    return found.get("m")


def test_wilson_gives_the_published_figures():
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for count, samples, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert metrics.wilson(count / samples, samples) == pytest.approx((low, high), abs=5e-5)
    assert metrics.wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_a_plain_number_that_counts_the_samples_is_a_proportion():
    found = interval(0.75, 48)
    assert (found.method, found.samples) == ("wilson", 48)
    assert (found.low, found.high) == pytest.approx(metrics.wilson(0.75, 48))
    percent = interval(75.0, 48)
    assert (percent.low, percent.high) == pytest.approx((100 * found.low, 100 * found.high))
    assert interval(np.float32(31 / 48), 48) is not None  # as float32 has it
    assert interval(1.0, 48, other=0.75) is not None  # all right, and the other one tells the kind


UNKNOWN = {
    "a mean probability": (0.5777, 48, 0.5776), "all of them, of whatever": (1.0, 48, 1.0), "none": (0.0, 48, None),
    "nearly one": (1 - 1e-7, 48, 1.0), "a count beside a mean": (0.75, 48, 0.7512), "negative": (-0.5, 48, None),
    "above 100": (750.0, 48, None), "one sample": (1.0, 1, None),
}  # fmt: skip


@pytest.mark.parametrize("value, asked, other", UNKNOWN.values(), ids=UNKNOWN)
def test_of_a_number_of_another_kind_no_interval_is_told(value, asked, other):
    assert interval(value, asked, other) is None


def test_a_proportion_may_come_with_its_samples():
    found = interval((93.13, 10_000), asked=100)
    assert found.samples == 10_000 and found.low < 93.13 < found.high and found.high - found.low < 1.1


def test_scores_of_the_samples_are_resampled_the_same_way_each_time():
    rng = np.random.default_rng(0)
    scores = rng.normal(0.6, 0.2, 400)
    measured = metrics.read({"dice": scores}, 400)
    assert measured["dice"].value == pytest.approx(scores.mean())
    found = interval(scores, 400)
    assert found.method == "bootstrap" and found == interval(scores, 400)
    normal = 1.96 * 0.2 / 20
    assert (found.high - found.low) / 2 == pytest.approx(normal, rel=0.15)
    assert interval(list(scores.astype(float)), 400) == found
    right = interval(scores > 0.5, 400)
    assert right.method == "wilson"  # of zeros and ones it is a proportion


def test_of_very_many_scores_the_interval_is_the_normal_one():
    scores = np.random.default_rng(0).normal(0.6, 0.2, 20_000)
    found = interval(scores, 20_000)
    assert found.method == "normal" and found.high - found.low == pytest.approx(2 * 1.96 * 0.2 / 20_000**0.5, rel=0.05)


WRONG = {
    "scores of something else": np.ones(19), "a matrix": np.ones((4, 2)), "NaN among them": [1, 2, 3, float("nan")],
    "no samples": (0.5, 0), "half a sample": (0.5, 1.5), "NaN of samples": (float("nan"), 4), "text": "good",
}  # fmt: skip


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_what_is_no_metric_is_refused(value):
    with pytest.raises(DataError, match="evaluate gave"):
        metrics.read({"m": value}, 4)


def test_the_samples_are_those_that_evaluate_asked_for():
    batches = [np.zeros((16, 3), np.float32), np.zeros((5, 3), np.float32)]

    def evaluate(predict):
        return {"accuracy": np.concatenate([predict({"x": x})["y"] for x in batches])[:, 0] == 0}

    recorded = record(evaluate, lambda inputs: {"y": inputs["x"]})
    assert recorded.samples == 21 and recorded.metrics == {"accuracy": 1.0}
    again = replayed(evaluate, recorded.calls, [{"y": x} for x in batches])
    assert again.samples == 21 and len(again.measured["accuracy"].scores) == 21


def test_an_input_without_a_batch_is_one_sample():
    recorded = record(
        lambda predict: {"n": predict({"x": np.zeros((3, 8, 8))})["y"].sum()}, lambda i: {"y": np.zeros(10)}
    )
    assert recorded.samples == 1
