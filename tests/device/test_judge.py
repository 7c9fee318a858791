"""Judging: each bound on both sides, what is not measured, the stricter of two, proxies by name."""

from __future__ import annotations

import math

import pytest

from edgeopt.device import judge
from edgeopt.spec.limits import Limits, stricter
from edgeopt.spec.manifest import Tolerance
from edgeopt.spec.report import CandidateResult


def result(**figures) -> CandidateResult:
    return CandidateResult(name="c", runtime="onnxruntime", precision="int8", **figures)


def verdicts(checks) -> dict[str, str]:
    return {check.name: check.verdict for check in checks}


@pytest.mark.parametrize(("accuracy", "verdict"), [(89.5, "pass"), (89.49, "fail"), (90.0, "pass"), (91.0, "pass")])
def test_a_metric_may_fall_by_its_limit_and_no_more(accuracy, verdict):
    checks = judge.accuracy(
        result(metrics={"accuracy": accuracy}), Tolerance(), {"accuracy": 90.0}, Limits(metric_drop={"accuracy": 0.5})
    )
    assert verdicts(checks) == {"metric accuracy": verdict}


@pytest.mark.parametrize(("accuracy", "verdict"), [(89.1, "pass"), (89.0, "fail")])
def test_a_metric_without_a_limit_may_fall_by_one_percent_of_itself(accuracy, verdict):
    checks = judge.accuracy(result(metrics={"accuracy": accuracy}), Tolerance(), {"accuracy": 90.0}, Limits())
    assert verdicts(checks) == {"metric accuracy": verdict}


def test_of_drop_and_minimum_the_stricter_counts():
    limits = Limits(metric_drop={"accuracy": 5}, metric_min={"accuracy": 88})
    checks = judge.accuracy(result(metrics={"accuracy": 87}), Tolerance(), {"accuracy": 90.0}, limits)
    assert checks[0].limit == 88
    assert checks[0].verdict == "fail"


def test_a_metric_that_was_not_measured_is_undecided_and_a_misspelt_limit_fails():
    limits = Limits(metric_min={"acuracy": 0.5})
    checks = judge.accuracy(result(), Tolerance(), {"accuracy": 0.9}, limits)
    assert verdicts(checks) == {"metric accuracy": "undecided", "metric acuracy": "fail"}


@pytest.mark.parametrize(("sqnr", "verdict"), [(20.0, "pass"), (19.9, "fail"), (math.inf, "pass"), (None, "undecided")])
def test_without_evaluate_sqnr_stands_in_and_is_called_a_proxy(sqnr, verdict):
    checks = judge.accuracy(result(sqnr_db=sqnr), Tolerance(), {}, Limits())
    assert verdicts(checks) == {"proxy sqnr_db": verdict}


def test_a_classifier_is_also_judged_by_its_classes():
    checks = judge.accuracy(result(sqnr_db=30, top1_agreement=0.98), Tolerance(), {}, Limits(), classifier=True)
    assert verdicts(checks) == {"proxy sqnr_db": "pass", "proxy top1_agreement": "fail"}


def test_the_error_against_the_reference_is_bounded_by_the_tolerance():
    checks = judge.accuracy(
        result(sqnr_db=50, max_abs_error=2e-3), Tolerance(sqnr_db=40, max_abs=1e-3), {}, Limits(sqnr_db=0)
    )
    assert verdicts(checks) == {
        "reference sqnr_db": "pass", "reference max_abs": "fail", "proxy sqnr_db": "pass",
    }  # fmt: skip


def test_performance_checks_only_what_is_limited_in_the_unit_of_its_name():
    limits = Limits(latency_ms=2, peak_rss_mb=100, size_mb=1)
    checks = judge.performance(result(p50_ms=2.5, p99_ms=99, peak_rss_mb=80), limits, size_bytes=2 << 20)
    assert {c.name: (c.value, c.verdict) for c in checks} == {
        "latency_ms": (2.5, "fail"), "peak_rss_mb": (80, "pass"), "size_mb": (2, "fail"),
    }  # fmt: skip


def test_the_verdict_is_the_worst():
    checks = judge.performance(result(p50_ms=1), Limits(latency_ms=2, latency_p99_ms=3))
    assert judge.verdict(checks) == "undecided"
    assert judge.verdict(checks[:1]) == "pass"
    assert judge.verdict(()) == "pass"


def test_of_project_and_profile_the_stricter_limit_wins():
    both = stricter(
        Limits(latency_ms=5, sqnr_db=25, metric_drop={"a": 1.0}, metric_min={"a": 0.5}),
        Limits(latency_ms=3, peak_rss_mb=9, sqnr_db=20, metric_drop={"a": 2.0, "b": 1.0}, metric_min={"a": 0.7}),
    )
    assert both == Limits(
        latency_ms=3, peak_rss_mb=9, sqnr_db=25, metric_drop={"a": 1.0, "b": 1.0}, metric_min={"a": 0.7}
    )
