from __future__ import annotations

import numpy as np
import pytest

from edgeopt.device import intervals
from edgeopt.device.choice import fastest, reason, selection, slower_integers, ties
from edgeopt.spec.report import CandidateResult

QUIET = {"cores": {"all": 4, "physical": 2}, "busy_rounds": 0}


def result(name: str, *rounds_ms: float, **fields) -> CandidateResult:
    """A result with the figures of its rounds; none of them: it was not timed."""
    p50 = float(np.median(rounds_ms)) if rounds_ms else None
    fields = {"name": name, "runtime": "onnxruntime", "precision": "fp32", "p50_ms": p50, **fields}
    return CandidateResult(rounds_ms=rounds_ms, **fields)


SIZES = {"a": 100, "b": 50, "c": 10}

CASES = {
    "fastest": ([result("a", 1.0, 1.0, 1.0), result("b", 2.0, 2.0, 2.0)], "a"),
    "rounds that cross are equal, and the smaller wins": (
        [result("a", 1.00, 1.02, 0.99, 1.01, 1.00), result("b", 1.01, 1.00, 1.01, 0.99, 1.03)], "b",
    ),
    "slower by 1 % in every round is slower": (
        [result("a", 1.00, 1.20, 0.90, 1.10, 1.00), result("b", 1.01, 1.22, 0.91, 1.115, 1.013)], "a",
    ),
    "paired: a slow round slows both": (
        [result("a", 1.0, 9.0, 1.0, 9.0, 1.0), result("b", 1.03, 9.3, 1.04, 9.3, 1.03)], "a",
    ),
    "however noisy, 20 % slower is no equal": ([result("a", 1.0, 3.0, 0.9), result("b", 1.2, 1.2, 1.2)], "a"),
    "a third one's noise does not matter": (
        [result("a", 1.0, 1.0, 1.0), result("b", 1.04, 1.04, 1.04), result("c", 0.9, 50, 90)], "a",
    ),
    "untimed ones lose": ([result("c"), result("a", 3.0)], "a"),
    "nothing timed": ([result("b"), result("c")], "b"),
    "one": ([result("c", 9.0)], "c"),
}  # fmt: skip


@pytest.mark.parametrize("results, best", CASES.values(), ids=CASES)
def test_the_fastest_and_of_those_that_tie_the_smallest(results, best):
    assert fastest(results, SIZES).name == best


def drawn(rng, mean: float, own: float, drift: np.ndarray) -> tuple[float, ...]:
    return tuple(mean * drift * rng.normal(1, own, len(drift)))


@pytest.mark.parametrize("truth, chosen", [(1.00, "b"), (1.10, "a")])
def test_rounds_whose_truth_is_known_are_judged_by_it(truth, chosen):
    """A machine that drifts by 30 % between rounds, candidates with 0.5 % of their own: 38 of 40 runs at least.

    Equal ones tie and the smaller is taken; one that is 10 % slower never ties.
    """
    right = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        drift = rng.uniform(1, 1.3, 9)
        a, b = result("a", *drawn(rng, 1.0, 0.005, drift)), result("b", *drawn(rng, truth, 0.005, drift))
        right += fastest([a, b], SIZES).name == chosen
    assert right >= 38 if truth == 1.0 else right == 40


def test_a_tie_is_one_of_the_ratio_and_not_of_the_intervals_of_the_two():
    """In the same rounds: unpaired, the medians' intervals overlap; paired, b is slower in every round."""
    a, b = result("a", 1.0, 2.0, 3.0, 4.0, 5.0), result("b", 1.02, 2.05, 3.07, 4.1, 5.1)
    assert intervals.median(b.rounds_ms).low < intervals.median(a.rounds_ms).high
    assert not ties(b, a)


def test_throughput_is_chosen_by_answers_a_second():
    slow = result("a", 2.0, 2.0, p50_ms=None, answers_per_s=500.0)
    quick = result("b", 0.5, 0.5, p50_ms=None, answers_per_s=2000.0)
    found = selection([slow, quick], SIZES, decided_by="build", where="here")
    assert (found.candidate, found.verdict, found.mode) == ("b", "faster", "throughput")
    assert found.reason == "an answer every 0.500 ms against a 2.000 ms (4.00 times)"
    assert found.figures["b"]["answers_per_s"] == 2000.0


def test_the_reason_gives_the_figures():
    results = [result("a", 1.0), result("b", 4.71), result("c", 2.5)]
    assert reason(results[0], results) == "p50 1.000 ms against c 2.500 ms (2.50 times), b 4.710 ms (4.71 times)"
    tie = "p50 4.710 ms against a 1.000 ms (0.21 times); not slower beyond the noise, and smaller"
    assert reason(results[1], results[:2]) == tie
    assert reason(results[0], results[:1]) == "the only candidate that passed: p50 1.000 ms"
    assert reason(result("a"), results) == "speed was not measured"


def test_an_int8_that_is_slower_is_not_chosen_and_a_sentence_says_so():
    floats = result("f", 10.28)
    slower = result("i", 15.52, precision="int8")
    chosen = selection([floats, slower], {"f": 4, "i": 1}, decided_by="build", where="this machine")
    assert chosen.candidate == "f"
    assert "i is not chosen: int8 is slower here, 15.520 ms against 10.280 ms of f" in chosen.reason
    assert slower_integers([floats, result("i", 5.0, precision="int8")]) == []
    noisy = result("f", 10.0, 10.6, 10.2)
    assert slower_integers([noisy, result("i", 10.5, 10.2, 10.4, precision="int8")]) == []  # rounds that cross
    assert slower_integers([slower]) == [] and slower_integers([result("f"), slower]) == []


def test_what_was_tuned_goes_into_the_selection_with_the_cores_it_holds_for():
    setting = {"threads": 2, "streams": 1, "flags": {"allow_spinning": False}}
    tuned = result("a", 1.0, setting=setting, tried=({**setting, "ms": 1.0},))
    chosen = selection([tuned, result("b", 2.0)], SIZES, decided_by="build", where="here", noise=QUIET)
    assert chosen.settings == {"cores": 4, **setting}
    not_tuned = tuned.model_copy(update={"tried": ()})
    assert selection([not_tuned], SIZES, decided_by="build", where="here", noise=QUIET).settings is None
    assert selection([tuned], SIZES, decided_by="build", where="here").settings is None


def test_a_choice_on_a_busy_machine_says_so():
    busy = result("a", 1.0, uncertain="other work used 60 % of the cores")
    assert selection([busy], SIZES, decided_by="build", where="here").reason.endswith(
        "; uncertain: other work used 60 % of the cores"
    )
