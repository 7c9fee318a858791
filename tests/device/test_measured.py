"""From the runner's raw answer to figures: percentiles, noise, errors, metrics, and answers that do not fit."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from edgeopt.device.measured import Questions, candidate_result, timing_feed
from edgeopt.device.runner import Failure, Response, Run
from edgeopt.errors import DataError
from edgeopt.runtime.tensors import PackWriter
from edgeopt.spec.manifest import Axis, Candidate, Feed, TensorSpec

CANDIDATE = Candidate(name="c", runtime="onnxruntime", precision="fp32", file="c.onnx")
GIVEN = [np.float32([[1, 2, 3]]), np.float32([[3, 2, 1], [0, 5, 0]])]


def answer(folder, outputs, **fields) -> Response:
    """A Response whose candidate 'c' gave `outputs`: feed id -> array."""
    with PackWriter(folder / "c.bin", "c.bin") as pack:
        refs = {feed: {"y": pack.add(array)} for feed, array in outputs.items()}
    values = {"status": "ok", "failure": None, "flags": (), "load_s": 0.5, "first_call_s": 0.25}
    values |= {"rounds_s": (), "peak_rss_bytes": 3 << 20, "outputs": refs} | fields
    return Response({}, {"c": Run(**values)}, folder)


@pytest.fixture
def asked(tmp_path):
    with PackWriter(tmp_path / "given.bin", "given.bin") as pack:
        feeds = tuple(Feed(inputs={"x": pack.add(y)}, outputs={"y": pack.add(y)}) for y in GIVEN)
    return Questions(tmp_path, feeds, (), None, classifier=True)


def both(*arrays) -> dict:
    return {f"reference/{i}": array for i, array in enumerate(arrays)}


def test_an_equal_answer_has_no_error(asked, tmp_path):
    result = candidate_result(CANDIDATE, answer(tmp_path, both(*GIVEN)), asked)
    assert (result.sqnr_db, result.max_abs_error, result.top1_agreement) == (math.inf, 0, 1)
    assert (result.load_s, result.first_call_ms, result.peak_rss_mb) == (0.5, 250, 3)


def test_errors_are_over_all_feeds_and_agreement_is_by_sample(asked, tmp_path):
    other = np.float32([[3, 2, 1], [6, 5, 0]])  # one value off by 6, which changes one class of three samples
    result = candidate_result(CANDIDATE, answer(tmp_path, both(GIVEN[0], other)), asked)
    assert result.top1_agreement == pytest.approx(2 / 3)
    assert result.max_abs_error == pytest.approx(6 / 5)
    assert result.sqnr_db == pytest.approx(10 * math.log10((14 + 14 + 25) / 36))


def test_percentiles_are_over_every_call_and_noise_is_between_rounds(asked, tmp_path):
    rounds = ((1e-3, 1e-3, 1e-3), (1.2e-3, 1.2e-3, 9e-3))
    result = candidate_result(CANDIDATE, answer(tmp_path, both(*GIVEN), rounds_s=rounds), asked)
    calls = [1, 1, 1, 1.2, 1.2, 9]
    assert result.p50_ms == pytest.approx(np.percentile(calls, 50))
    assert result.p99_ms == pytest.approx(np.percentile(calls, 99))
    assert result.calls == 6
    assert result.noise == pytest.approx(0.2 / (2 * 1.1))


def test_what_was_tuned_and_what_else_the_machine_did_come_along(asked, tmp_path):
    setting = {"threads": 2, "streams": 1, "flags": {}}
    response = answer(
        tmp_path, both(*GIVEN), rounds_s=((1e-3,), (2e-3,), (4e-3,)), setting=setting, tried=({**setting, "ms": 1},),
        warm_up={"calls": 10, "seconds": 0.1, "stable": True},
    )  # fmt: skip
    noise = {"busy_rounds": 1, "others": 0.6, "steal": 0.0}
    result = candidate_result(CANDIDATE, dataclasses.replace(response, noise=noise), asked)
    assert result.rounds_ms == pytest.approx((1, 2, 4)) and result.interval_ms == pytest.approx((1, 4))
    assert (result.setting, result.warm_up["calls"], len(result.tried)) == (setting, 10, 1)
    assert result.uncertain == "other work used 60 % of the cores"
    quiet = candidate_result(CANDIDATE, dataclasses.replace(response, noise={**noise, "busy_rounds": 0}), asked)
    assert quiet.uncertain is None


def test_throughput_gives_answers_a_second_in_place_of_percentiles(asked, tmp_path):
    response = answer(tmp_path, both(*GIVEN), rounds_s=((2e-3,), (4e-3,), (5e-3,)))
    result = candidate_result(CANDIDATE, response, dataclasses.replace(asked, mode="throughput"))
    assert result.answers_per_s == pytest.approx(250) and result.p50_ms is None and result.p99_ms is None
    assert result.ms == pytest.approx(4)


def test_a_failed_run_is_a_failure_in_words(asked, tmp_path):
    failed = answer(tmp_path, {}, status="failed", failure=Failure(kind="abort", message="died", signal=6))
    result = candidate_result(CANDIDATE, failed, asked)
    assert result.failure == "abort: died"
    assert result.p50_ms is None and result.sqnr_db is None


def test_an_output_of_another_size_fails_this_candidate_alone(asked, tmp_path):
    result = candidate_result(CANDIDATE, answer(tmp_path, both(GIVEN[0], GIVEN[0])), asked)
    assert result.failure is not None and "(1, 3)" in result.failure and "(2, 3)" in result.failure


def test_metrics_come_from_the_recorded_answers_and_only_to_the_recorded_questions(asked, tmp_path):
    def evaluate(predict):
        return {"sum": float(predict({"x": GIVEN[1]})["y"].sum())}

    cases = (asked.reference[1],)
    answers = answer(tmp_path, {**both(*GIVEN), "cases/0": GIVEN[1] * 2})
    result = candidate_result(CANDIDATE, answers, Questions(tmp_path, asked.reference, cases, evaluate))
    assert result.metrics == {"sum": 22}
    with pytest.raises(DataError, match="not deterministic"):
        candidate_result(
            CANDIDATE,
            answers,
            Questions(tmp_path, asked.reference, cases, lambda p: evaluate(lambda x: p({"x": GIVEN[0]}))),
        )


@pytest.mark.parametrize(("opt", "feed"), [(1, "reference/0"), (2, "reference/1"), (5, "reference/0")])
def test_the_call_of_the_opt_size_is_timed(asked, opt, feed):
    inputs = (TensorSpec(name="x", dtype="float32", shape=("n", 3)),)
    assert timing_feed(inputs, {"n": Axis(min=1, opt=opt, max=8)}, asked.reference) == feed
