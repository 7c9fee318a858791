from __future__ import annotations

import pytest

from edgeopt.device.choice import fastest, reason, selection, slower_integers
from edgeopt.spec.report import CandidateResult


def result(name: str, p50_ms: float | None, noise: float | None = None) -> CandidateResult:
    return CandidateResult(name=name, runtime="onnxruntime", precision="fp32", p50_ms=p50_ms, noise=noise)


SIZES = {"a": 100, "b": 50, "c": 10}

CASES = {
    "fastest": ([result("a", 1.0), result("b", 2.0)], "a"),
    "within the noise the smaller": ([result("a", 1.0, 0.05), result("b", 1.04, 0.0)], "b"),
    "outside the noise the faster": ([result("a", 1.0, 0.03), result("b", 1.04, 0.0)], "a"),
    "the noise of either counts": ([result("a", 1.0, 0.0), result("b", 1.04, 0.05)], "b"),
    "a third one's noise does not": ([result("a", 1.0, 0.0), result("b", 1.04, 0.0), result("c", 50.0, 0.9)], "a"),
    "untimed ones lose": ([result("c", None), result("a", 3.0)], "a"),
    "nothing timed": ([result("b", None), result("c", None)], "b"),
    "one": ([result("c", 9.0)], "c"),
}


@pytest.mark.parametrize("results, best", CASES.values(), ids=CASES)
def test_the_fastest_and_within_the_noise_the_smallest(results, best):
    assert fastest(results, SIZES).name == best


def test_the_reason_gives_the_figures():
    results = [result("a", 1.0), result("b", 4.71), result("c", 2.5)]
    assert reason(results[0], results) == "p50 1.000 ms against c 2.500 ms (2.50 times), b 4.710 ms (4.71 times)"
    tie = "p50 4.710 ms against a 1.000 ms (0.21 times); not slower beyond the noise, and smaller"
    assert reason(results[1], results[:2]) == tie
    assert reason(results[0], results[:1]) == "the only candidate that passed: p50 1.000 ms"
    assert reason(result("a", None), results) == "speed was not measured"


def test_an_int8_that_is_slower_is_not_chosen_and_a_sentence_says_so():
    floats = result("f", 10.28)
    slower = result("i", 15.52).model_copy(update={"precision": "int8"})
    chosen = selection([floats, slower], {"f": 4, "i": 1}, decided_by="build", where="this machine")
    assert chosen.candidate == "f"
    assert "i is not chosen: int8 is slower here, 15.520 ms against 10.280 ms of f" in chosen.reason
    faster = slower.model_copy(update={"p50_ms": 5.0})
    assert slower_integers([floats, faster]) == []
    equal = slower.model_copy(update={"p50_ms": 10.5, "noise": 0.05})
    assert slower_integers([floats, equal]) == []  # within the noise
    assert slower_integers([slower]) == [] and slower_integers([result("f", None), slower]) == []
