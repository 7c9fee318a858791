from __future__ import annotations

from edgeopt.report.text import plain, render
from edgeopt.spec.report import CandidateResult, Check, Interval, Report

GOOD = CandidateResult(
    name="onnxruntime-int8", runtime="onnxruntime", precision="int8", load_s=0.25, p50_ms=1.2345, p90_ms=1.5,
    p99_ms=2.0, calls=250, peak_rss_mb=57.3, size_bytes=7 << 19, metrics={"accuracy": 0.9812},
    sqnr_db=31.26, max_abs_error=0.0123,
)  # fmt: skip
EXACT = CandidateResult(
    name="torchscript-fp32", runtime="torchscript", precision="fp32", p50_ms=5.0, max_abs_error=0.0, sqnr_db=None,
    flags=({"flag": "nvfuser", "status": "missing", "message": "gone"}, {"flag": "texpr_fuser", "status": "applied"}),
)  # fmt: skip
FAILED = CandidateResult(name="tensorrt-int8", runtime="tensorrt", precision="int8", failure="missing-runtime: later")
ENVIRONMENT = {
    "python": "3.8.10", "machine": "aarch64", "cpu_model": "ARMv8", "memory_bytes": 8 << 30,
    "runtimes": {"onnxruntime": "1.15.1", "torch": None},
}  # fmt: skip


def report(**changes) -> Report:
    fields = {
        "artifact": "digits", "digest": "ab" * 32, "profile": "xavier", "host": "nvidia@jetson:22",
        "when_utc": "2026-11-30T12:00:00Z", "verdict": "pass", "chosen": "onnxruntime-int8",
        "reason": "p50 1.234 ms against torchscript-fp32 5.000 ms (4.05 times)",
        "checks": (
            Check(name="onnxruntime-int8: metric accuracy", verdict="pass", value=0.98, limit=0.97, evidence="e"),
            Check(name="tensorrt-int8: runs", verdict="undecided", evidence="the engine is not built"),
        ),
        "candidates": (GOOD, EXACT, FAILED), "environment": ENVIRONMENT, "seconds": 3.0, **changes,
    }  # fmt: skip
    return Report(**fields)


def test_the_verdict_stands_first_and_the_figures_in_columns():
    lines = plain(report()).splitlines()
    assert lines[0] == "PASS  digits on nvidia@jetson:22"
    assert lines[1] == "runs onnxruntime-int8: p50 1.234 ms against torchscript-fp32 5.000 ms (4.05 times)"
    header, good, exact, failed = lines[3:7]
    columns = (
        "candidate", "p50 ms", "p90 ms", "p99 ms", "load s", "peak MiB", "size MiB", "accuracy", "SQNR dB", "max error",
    )  # fmt: skip
    assert header.split() == " ".join(columns).split()
    figures = ["1.234", "1.500", "2.000", "0.25", "57", "3.50", "0.9812", "31.3", "0.012"]
    assert good.split() == ["onnxruntime-int8", *figures]
    assert exact.split() == ["torchscript-fp32", "5.000", "-", "-", "-", "-", "-", "-", "exact", "0"]
    assert failed.split() == ["tensorrt-int8", "not", "run"]


def test_a_metric_stands_with_its_interval_where_one_is_known():
    sure = GOOD.model_copy(
        update={"intervals": {"accuracy": Interval(low=0.97, high=0.99, samples=800, method="wilson")}}
    )
    assert "0.9812 [0.97, 0.99]" in plain(report(candidates=(sure,)))


def test_what_did_not_pass_is_said_and_what_passed_is_counted():
    text = plain(report())
    assert "undecided tensorrt-int8: runs: the engine is not built" in text
    assert "1 of 2 checks passed" in text
    assert "metric accuracy" not in text


def test_flags_that_were_not_applied_are_said():
    text = plain(report())
    assert "flag nvfuser of torchscript-fp32 is missing: gone" in text
    assert "texpr_fuser" not in text


def test_the_device_and_the_artifact_are_named():
    lines = plain(report()).splitlines()
    assert lines[-2] == "ARMv8, aarch64, 8.0 GiB, Python 3.8.10, onnxruntime 1.15.1"
    assert lines[-1] == "artifact abababababab, profile xavier, 2026-11-30T12:00:00Z"
    assert plain(report(environment={}))


def test_simulated_figures_are_marked_before_anything_else():
    first = plain(report(simulated="recorded on another day")).splitlines()[0]
    assert first == "SIMULATED: recorded on another day. These are not the device's figures."


def test_a_report_without_a_choice_gives_the_reason():
    lines = plain(report(verdict="fail", chosen=None, reason="no candidate passes: a: b")).splitlines()
    assert lines[:2] == ["FAIL  digits on nvidia@jetson:22", "no candidate passes: a: b"]


def test_text_of_the_user_is_no_markup():
    assert "[bold]x[/nope]" in plain(report(reason="[bold]x[/nope]"))
    assert render(report())


def test_figures_that_are_not_finite_are_dashes():
    """JSON has no infinity, so a report that was read back has null where the SQNR was infinite."""
    odd = GOOD.model_copy(update={"sqnr_db": float("-inf"), "max_abs_error": float("inf")})
    row = plain(report(candidates=(odd,))).splitlines()[4]
    assert row.split()[-2:] == ["-", "inf"]
