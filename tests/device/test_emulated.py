"""What an emulator's figures are worth: outputs are judged, times are not and nothing is chosen by them."""

from __future__ import annotations

import pytest

from edgeopt.device import choice, emulated, judge
from edgeopt.report.text import plain
from edgeopt.spec.limits import Limits
from edgeopt.spec.manifest import Selection
from edgeopt.spec.report import CandidateResult, Report

QEMU = "qemu-user 7.2.22"


def result(name: str, p50_ms: float) -> CandidateResult:
    return CandidateResult(
        name=name, runtime="onnxruntime", precision="fp32", p50_ms=p50_ms, p99_ms=2 * p50_ms, rounds_ms=(p50_ms,) * 5,
        peak_rss_mb=900.0,
    )  # fmt: skip


@pytest.mark.parametrize("p50_ms", [1.0, 100.0], ids=["within", "beyond"])
def test_no_limit_of_time_or_memory_is_judged_and_one_of_size_is(p50_ms):
    limits = Limits(latency_ms=10, latency_p99_ms=10, peak_rss_mb=100, size_mb=1)
    checks = emulated.unjudged(judge.performance(result("a", p50_ms), limits, size_bytes=5 << 20), QEMU)
    verdicts = {check.name: check.verdict for check in checks}
    assert verdicts == {
        "latency_ms": "undecided", "latency_p99_ms": "undecided", "peak_rss_mb": "undecided", "size_mb": "fail",
    }  # fmt: skip
    assert all(QEMU in check.evidence for check in checks if check.name != "size_mb")


def test_on_a_device_all_stays_as_it_was():
    found = [result("a", 3.0), result("b", 2.0)]
    assert emulated.untimed(found, None, "a") == tuple(found) and emulated.check(None) == ()


@pytest.mark.parametrize("first", ["a", "b", None])
def test_the_faster_one_is_not_chosen_but_the_one_that_the_build_chose(first):
    found = emulated.untimed([result("a", 9.0), result("b", 1.0)], QEMU, first)
    chosen = emulated.marked(choice.selection(found, {"a": 9, "b": 1}, decided_by="validate", where="x"), QEMU)
    assert chosen.candidate == (first or "a") and chosen.verdict == "undecided"
    assert chosen.reason.startswith(f"EMULATED ({QEMU})") and chosen.figures["b"]["p50_ms"] is None


def test_a_choice_made_on_a_device_is_kept_unless_its_candidate_did_not_run():
    def chosen(name: str) -> Selection:
        return Selection(candidate=name, decided_by="validate", where="x", reason="", verdict="faster")

    assert not emulated.changes(chosen("a"), chosen("a"), QEMU)
    assert emulated.changes(chosen("a"), chosen("b"), QEMU) and emulated.changes(None, chosen("b"), QEMU)
    assert emulated.changes(chosen("a"), chosen("a"), None)


def test_the_mark_stands_before_everything_and_beside_each_figure():
    report = Report(
        artifact="net", digest="0" * 64, profile="xavier", host="h", when_utc="2026-11-30T00:00:00Z",
        verdict="undecided", chosen="a", reason="r", checks=emulated.check(QEMU), candidates=(result("a", 3.0),),
        environment={}, emulated=QEMU, seconds=1.0,
    )  # fmt: skip
    lines = plain(report).splitlines()
    assert lines[0].startswith(f"EMULATED: {QEMU}") and any(line.startswith("a (emulated)") for line in lines)
