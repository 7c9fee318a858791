"""Comparing reports: what is noise, what is not, and what cannot be compared at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeopt.device import intervals
from edgeopt.errors import ArtifactError, UsageError
from edgeopt.flows.compare import compare, kept_reports, reports_of
from edgeopt.flows.validate import How, validate_here
from edgeopt.report.compare import render
from edgeopt.spec.report import CandidateResult, Conditions, Figure, Interval, Report
from tests.small_project import run_edgeopt
from tests.tiny import tiny_artifact

NOISE = np.random.default_rng(0).normal(0, 0.01, 9)
ENVIRONMENT = {"machine": "aarch64", "cpu_model": "ARMv8", "cpu_count": 8, "runtimes": {"onnxruntime": "1.16.3"}}


def candidate(name: str = "onnxruntime-fp32", *, ms: float = 10.0, **fields) -> CandidateResult:
    rounds = tuple(float(x) for x in ms * (1 + NOISE))
    values = {
        "p50_ms": ms, "p90_ms": ms * 1.1, "p99_ms": ms * 1.3, "rounds_ms": rounds, "peak_rss_mb": 100.0,
        "size_bytes": 1000, "calls": 450, **fields,
    }  # fmt: skip
    return CandidateResult(name=name, runtime="onnxruntime", precision="fp32", **values)


def report(
    *candidates: CandidateResult, mode: str | None = "MAXN", environment: dict | None = None, **fields
) -> Report:
    candidates = candidates or (candidate(),)
    values = {
        "artifact": "tiny", "digest": "d" * 64, "profile": "xavier", "host": "jetson",
        "when_utc": "2026-12-01T00:00:00Z",
        "verdict": "pass", "chosen": candidates[0].name, "reason": "", "checks": (), "candidates": candidates,
        "environment": {**ENVIRONMENT, **(environment or {})}, "seconds": 1.0,
        "conditions": Conditions(power_mode=mode),
        **fields,
    }  # fmt: skip
    return Report(**values)


def of(a: Report, b: Report):
    return compare(("a.json", a), ("b.json", b))


def figure(found, name: str):
    return next(f for f in found.candidates[0].figures if f.name == name)


@pytest.mark.parametrize(
    ("times", "verdict", "words"),
    [(1.3, "worse", "slower"), (0.7, "better", "faster"), (1.0, "same", "same"), (1.01, "same", "same")],
)
def test_latency_is_judged_beyond_the_noise(times, verdict, words):
    found = of(report(candidate(ms=10)), report(candidate(ms=10 * times)))
    latency = figure(found, "latency")
    assert (latency.verdict, latency.words) == (verdict, words) and found.verdict == verdict
    assert latency.ratio == pytest.approx(times) and latency.interval[0] <= times <= latency.interval[1]


def test_a_change_within_wide_rounds_is_the_same():
    wide = tuple(10 * (1 + 20 * x) for x in NOISE)
    found = of(report(candidate(rounds_ms=wide)), report(candidate(rounds_ms=tuple(1.05 * x for x in wide[::-1]))))
    assert figure(found, "latency").verdict == "same"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"host": "other"}, "other host: jetson, other"),
        ({"mode": "MODE_10W"}, "other power mode: MAXN, MODE_10W"),
        ({"mode": None}, "other power mode: MAXN, unknown"),
        ({"simulated": "a recording"}, "B is simulated"),
        ({"environment": {"emulated": "qemu-user 7.2"}}, "emulator: qemu-user 7.2"),
        ({"environment": {"machine": "x86_64"}}, "other architecture"),
        ({"environment": {"cpu_count": 4}}, "number of cores"),
    ],
)
def test_times_of_other_circumstances_are_not_compared(change, word):
    found = of(report(), report(candidate(ms=20, peak_rss_mb=100.0), **change))
    latency = figure(found, "latency")
    assert latency.verdict == "not comparable" and word in latency.words and latency.interval is None
    assert found.verdict == "not comparable" and any(word in note for note in found.notes)
    assert figure(found, "file size").verdict == "same"  # which depends on none of them


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"throttled_rounds": 2}, "throttled"),
        ({"uncertain": "other work used 40 % of the cores"}, "busy"),
        ({"answers_per_s": 50.0}, "throughput"),
        ({"rounds_ms": (10.0, 10.1)}, "2 rounds"),
        ({"p50_ms": None, "rounds_ms": ()}, "not timed"),
    ],
)
def test_times_that_prove_nothing_are_not_compared(change, word):
    for a, b in ((candidate(), candidate(**change)), (candidate(**change), candidate())):
        timed = [f for f in of(report(a), report(b)).candidates[0].figures if f.name in ("latency", "time an answer")]
        assert timed[0].verdict == "not comparable" and word in timed[0].words


def wilson(low: float, high: float) -> dict:
    return {"intervals": {"accuracy": Interval(low=low, high=high, samples=1000, method="wilson")}}


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((0.95, 0.935, 0.962), (0.94, 0.924, 0.953), "same"),
        ((0.95, 0.935, 0.962), (0.90, 0.880, 0.917), "worse"),
        ((0.90, 0.880, 0.917), (0.95, 0.935, 0.962), "better"),
    ],
)
def test_a_metric_is_judged_by_its_intervals(a, b, verdict):
    results = [candidate(metrics={"accuracy": value}, **wilson(low, high)) for value, low, high in (a, b)]
    found = of(*map(report, results))
    assert figure(found, "metric accuracy").verdict == verdict == found.verdict


def test_a_metric_without_interval_goes_by_one_percent():
    a, b, c = (candidate(metrics={"loss": value}) for value in (1.0, 0.995, 0.9))
    assert figure(of(report(a), report(b)), "metric loss").verdict == "same"
    worse = figure(of(report(a), report(c)), "metric loss")
    assert worse.verdict == "worse" and "interval unknown" in worse.words


def test_power_and_memory():
    def watts(value):
        return Figure(value=value, low=value - 0.1, high=value + 0.1, rounds=5)

    found = of(report(candidate(power_w=watts(10))), report(candidate(power_w=watts(12), peak_rss_mb=150.0)))
    assert figure(found, "power").verdict == "worse" and figure(found, "peak memory").verdict == "worse"
    assert found.verdict == "worse" and {r.split(":")[0] for r in found.reasons} == {"power", "peak memory"}
    same = of(report(candidate(power_w=watts(10))), report(candidate(power_w=watts(10.05), peak_rss_mb=101.0)))
    assert same.verdict == "same"
    one_sided = of(report(candidate(power_w=watts(10))), report())
    assert figure(one_sided, "power").verdict == "not comparable" and one_sided.verdict == "same"


def test_candidates_of_one_report_and_those_that_did_not_run_are_named():
    a = report(candidate("x"), candidate("old"), candidate("broken"))
    b = report(candidate("x"), candidate("new"), candidate("broken", failure="missing-runtime: none"))
    found = {c.a or c.b: c for c in of(a, b).candidates}
    assert (found["old"].only, found["new"].only, found["broken"].only) == ("A", "B", "A")
    assert "missing-runtime" in found["broken"].why


def test_what_runs_is_compared_where_another_candidate_was_chosen():
    a = report(candidate("float", ms=10), candidate("int8", ms=12))
    b = report(candidate("float", ms=10), candidate("int8", ms=5), chosen="int8")
    found = of(a, b)
    assert (found.runs.a, found.runs.b, found.verdict) == ("float", "int8", "better")


def test_a_report_that_fails_is_worse_whatever_its_times():
    found = of(report(), report(candidate(ms=5), verdict="fail", chosen=None, reason="no candidate passes"))
    assert found.verdict == "worse" and "no candidate passes" in found.reasons[0]
    assert of(report(verdict="fail", chosen=None), report()).verdict == "better"


def test_circumstances_that_changed_are_listed_and_no_others():
    a = report(candidate(setting={"threads": 4}, flags=({"flag": "texpr", "status": "applied"},)))
    b = report(
        candidate(setting={"threads": 2}, flags=({"flag": "texpr", "status": "missing"},)),
        digest="e" * 64, environment={"runtimes": {"onnxruntime": "1.17.0"}},
    )  # fmt: skip
    changed = {d.name: (d.a, d.b) for d in of(a, b).circumstances}
    assert changed == {
        "digest": ("d" * 12, "e" * 12), "onnxruntime version": ("1.16.3", "1.17.0"),
        "onnxruntime-fp32 threads": ("4", "2"), "onnxruntime-fp32 flag texpr": ("applied", "missing"),
    }  # fmt: skip
    assert of(a, a).circumstances == ()


def test_the_interval_of_a_ratio_of_medians_covers_it():
    """95 % of intervals hold the true ratio, counted over 300 draws: the count is binomial, 12 points are 8 sigma."""
    draw = np.random.default_rng(4)
    held = 0
    for _ in range(300):
        found = intervals.ratio_of_medians(draw.normal(12, 0.3, 15), draw.normal(10, 0.3, 15))
        held += found.low <= 1.2 <= found.high
    assert held > 300 * 0.83


def test_the_difference_of_two_proportions_is_newcombes():
    """Newcombe, Statistics in Medicine 17 (1998), table II, method 10: 56/70 less 48/80 is 0.0524 to 0.3339."""
    a, b = intervals.Estimate(0.6, 0.4904, 0.7004), intervals.Estimate(0.8, 0.6918, 0.8774)  # Wilson's of 48/80, 56/70
    found = intervals.difference(a, b)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-3)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """An artifact that was validated twice, within one second or not."""
    made = tiny_artifact(tmp_path_factory.mktemp("compare"), torchscript=False)
    for _ in range(2):
        validate_here(made, How(python=sys.executable, rounds=3, calls=5, threads=1))  # nothing tuned
    return made


def test_every_validation_is_kept(artifact):
    kept = kept_reports(artifact.folder)
    assert len(kept) == 2
    same_second = tiny_artifact(artifact.folder.parent / "again", torchscript=False)
    (same_second.folder / "reports").mkdir()
    from edgeopt.flows import validate

    paths = [validate._write(same_second, report()) for _ in range(3)]
    assert len(set(paths)) == 3 and kept_reports(same_second.folder) == paths == sorted(paths)


def test_two_real_validations_are_compared(artifact):
    (name_a, a), (name_b, b) = reports_of(artifact.folder, None, 2)
    assert [Path(name_a), Path(name_b)] == kept_reports(artifact.folder)
    found = compare((name_a, a), (name_b, b))
    assert found.circumstances == ()
    assert figure(found, "file size").verdict == "same" and figure(found, "latency").unit == "ms"


def test_a_report_is_found_by_file_or_by_artifact(artifact):
    first, newest = kept_reports(artifact.folder)
    (name_a, _), (name_b, _) = reports_of(first, artifact.folder, None)
    assert (Path(name_a), Path(name_b)) == (first, newest)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda folder: (folder, None, None), UsageError, "two reports"),
        (lambda folder: (folder, folder, 2), UsageError, "two reports"),
        (lambda folder: (folder, None, 9), ArtifactError, "2 reports are kept"),
        (lambda folder: (folder / "no.json", folder, None), ArtifactError, "no such report"),
        (lambda folder: (folder / "manifest.json", folder, None), ArtifactError, "unknown key"),
        (lambda folder: (folder / "float.onnx", folder, None), ArtifactError, "not JSON"),
        (lambda folder: (folder / "nowhere", None, 2), ArtifactError, "no such artifact"),
        (lambda folder: (folder / "reference", folder, None), ArtifactError, "no report yet"),
    ],
)
def test_bad_input_is_answered(artifact, make, error, message):
    with pytest.raises(error, match=message) as told:
        reports_of(*make(artifact.folder))
    assert told.value.where and told.value.todo


def test_the_command(tmp_path):
    paths = []
    for name, ms in (("a", 10), ("b", 20)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(report(candidate(ms=ms)).model_dump_json())
    a, b = map(str, paths)
    told = run_edgeopt("compare", a, b, "--json")
    assert told.returncode == 0 and json.loads(told.stdout)["verdict"] == "worse"
    worse = run_edgeopt("compare", a, b, "--fail-if-worse")
    assert worse.returncode == 16 and worse.stdout.startswith("WORSE  latency: slower") and "slower" in worse.stderr
    assert run_edgeopt("compare", b, a, "--fail-if-worse").returncode == 0


def test_the_text_says_what_is_there():
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(render(of(report(), report(candidate(ms=13), host="other"))))
    said = console.file.getvalue()
    assert "NOT COMPARABLE" in said and "+30.0 %" in said and "other host: jetson, other" in said
