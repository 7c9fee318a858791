"""What `edgeopt bench` prints of rows that are given."""

from __future__ import annotations

from edgeopt.cli.bench_lines import table
from edgeopt.device.intervals import Estimate
from edgeopt.flows.bench import Benched, Row
from edgeopt.spec.report import CandidateResult


def result(name: str, ms: float | None, **fields) -> CandidateResult:
    interval = None if ms is None else (0.9 * ms, 1.1 * ms)
    return CandidateResult(name=name, runtime="x", precision="fp32", p50_ms=ms, interval_ms=interval, **fields)


def test_the_table_has_a_line_a_contender_and_those_without_figures_below():
    setting = {"threads": 2, "streams": 1, "flags": {"allow_spinning": False}}
    rows = (
        Row(
            result("onnxruntime-int8", 1.0, setting=setting, sqnr_db=30.25, top1_agreement=0.98),
            True,
            Estimate(1, 1, 1),
        ),
        Row(result("eager", 4.5, max_abs_error=0.0), False, Estimate(4.5, 4.2, 4.9)),
        Row(result("openvino", None, failure="load: no OpenVINO"), False),
    )
    noise = {"cores": {"all": 4}, "repeated": 2}
    done = Benched("net", "box", "latency", rows, noise, {"cpu_model": "A CPU", "runtimes": {"torch": "2.13"}}, None)
    lines = table(done).splitlines()
    assert lines[0] == "net on box, latency: one call, numpy in to numpy out"
    assert lines[2].split("  ")[1:2] == ["onnxruntime-int8 (ours)"]
    assert "30.2" in lines[2] and "98 %" in lines[2] and lines[2].endswith("2 threads, no spinning")
    assert "4.50 (4.20 - 4.90)" in lines[3] and "equal" in lines[3] and lines[3].endswith("its defaults")
    assert lines[4] == "  no figures: openvino: load: no OpenVINO"
    assert lines[5] == "A CPU, 4 cores, torch 2.13; 2 rounds of a busy machine were done again"


def test_a_busy_machine_is_said():
    why = "other work used 60 % of the cores"
    done = Benched("net", "box", "throughput", (Row(result("a", 1.0), False),), None, {}, why)
    assert table(done).endswith("UNCERTAIN: other work used 60 % of the cores while this was measured")
