"""Mixed precision from end to end: small projects whose bad layer is known by construction."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest

from edgeopt.flows.build import Built, Listener
from edgeopt.flows.build import build as run_build
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.tries import Try
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
from tests.mixed_project import mixed_project

NATIVE = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}[platform.machine()]
ONE_BACKEND = {"backends": "[onnxruntime]"}
PER_TENSOR = {"quantization.per_channel": "false"}


@dataclass
class Told:
    """What a build told, in order."""

    tries: list[Try] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)


def build(folder: Path, out: Path, *, profile: dict | None = None, project: dict | None = None, **how):
    """A build in this process: (Built, what it told)."""
    told = Told()
    listener = Listener(gate=lambda name, row: told.gates.append(name), tried=told.tries.append)
    job = Job(
        load_profile(NATIVE, ONE_BACKEND | (profile or {})), load_project(folder, project or {}), folder / ".edgeopt"
    )
    return run_build(job, out, listener=listener, **how), told


def command(project: Path, out: Path) -> list[str]:
    """The same build as a command line."""
    one_backend = ["--set", "profile.backends=[onnxruntime]"]
    return ["build", "--profile", NATIVE, *one_backend, "--project", str(project), "--out", str(out)]


def int8(built: Built) -> dict:
    return next(c for c in built.record["candidates"] if c["name"] == "onnxruntime-int8")


def mixed(built: Built) -> dict | None:
    return built.record["mixed_precision"]


def float_weights(artifact: Artifact) -> list[str]:
    """Convolution weights that the int8 file stores as floats."""
    graph = onnx.load(artifact.path("int8.onnx")).graph
    return [i.name for i in graph.initializer if len(i.dims) == 4 and i.data_type == onnx.TensorProto.FLOAT]


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """A project whose layer `bad` no integers can compute; built once, so that its float stages are cached."""
    folder = tmp_path_factory.mktemp("mixed")
    project = mixed_project(folder / "project")
    built, told = build(project, folder / "bars.edgeopt")
    return project, built, told


def copied(hidden, folder: Path, *, without_search: bool = True) -> Path:
    """The project with its cached stages, and with no trace of the search."""
    shutil.copytree(hidden[0], folder / "project")
    if without_search:
        shutil.rmtree(folder / "project/.edgeopt/mixed")
        shutil.rmtree(folder / "project/.edgeopt/cache/artifact")
    return folder / "project"


def test_exactly_the_layer_that_cannot_be_integers_is_left_float(hidden):
    _, built, told = hidden
    assert int8(built)["kept"] and not mixed(built)["ended"]
    assert mixed(built)["setup"]["names"] == ["bad"]
    assert float_weights(built.artifact) == ["bad.weight"]
    assert mixed(built)["ranked"][0]["layer"]["path"] == "bad"
    assert [t.what for t in told.tries][0] == "trained (QAT)" and "add 'train'" in told.tries[0].reason
    assert told.tries[1].passed and len(told.tries[1].layers_float) > 1  # something to ship comes first
    assert told.tries[2].passed and told.tries[2].layers_float == ("bad",)
    assert told.gates[-1] == "after the search"


def test_what_was_measured_and_tried_is_in_the_record(hidden):
    _, built, _ = hidden
    record = json.loads((built.artifact.folder / "build.json").read_text())
    tries = record["mixed_precision"]["tries"]
    assert [t["passed"] for t in tries] == [False, True, True]
    assert all(t["metrics"]["closeness"] > 0.8 and t["seconds"] > 0 for t in tries[1:])
    facts = int8(built)["facts"]
    assert (facts["meant"], facts["simulated"]["sqnr_db"] > 60) == (4, True)
    assert record["candidates"][0]["facts"]["size_bytes"] > 0
    assert built.record["unoptimised"]["metrics"]["closeness"] == pytest.approx(1)


def test_an_unchanged_build_searches_nothing_and_gives_the_same(hidden, tmp_path):
    project, built, _ = hidden
    again, told = build(project, tmp_path / "again.edgeopt")
    assert again.record["cached"] and not told.tries
    assert again.artifact.digest == built.artifact.digest


def test_where_int8_keeps_the_limits_nothing_is_searched(hidden, tmp_path):
    """No try, no ranking, no times of layers: nothing of the search is even imported."""
    project = copied(hidden, tmp_path)
    shutil.rmtree(project / ".edgeopt/cache/sensitivity", ignore_errors=True)
    code = (
        "import sys, edgeopt.cli\n"
        "try: edgeopt.cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "searching = {'edgeopt.quant.sensitivity', 'edgeopt.backends.layer_times', 'edgeopt.pipeline.ranking'}\n"
        "assert not searching & set(sys.modules), searching & set(sys.modules)\n"
    )
    argv = command(project, tmp_path / "x.edgeopt")
    loose = ["--set", "project.limits.metric_min={closeness: -9}"]
    done = subprocess.run([sys.executable, "-c", code, *argv, *loose], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "search" not in done.stdout and not (project / ".edgeopt/mixed").exists()
    assert json.loads((tmp_path / "x.edgeopt/build.json").read_text())["mixed_precision"] is None


@pytest.mark.slow
def test_without_evaluate_the_proxy_is_searched_for(hidden, tmp_path):
    project = copied(hidden, tmp_path)
    limits = {"evaluate": "null", "limits": "{sqnr_db: 38}"}
    built, told = build(project, tmp_path / "x.edgeopt", project=limits)
    assert told.tries and int8(built)["kept"]
    assert mixed(built)["setup"]["names"] == ["bad"]
    assert int8(built)["result"]["sqnr_db"] > 38


@pytest.mark.slow
def test_weights_per_channel_come_before_layers_in_float(tmp_path):
    project = mixed_project(tmp_path / "project", "spread", least=0.8)
    built, told = build(project, tmp_path / "x.edgeopt", profile={**PER_TENSOR, "quantization.improve": "[biases]"})
    assert [(t.what, t.passed) for t in told.tries] == [("per-channel weights, calibrated (PTQ)", True)]
    assert mixed(built)["setup"]["keep"] == [] and int8(built)["kept"]
    assert not float_weights(built.artifact)
    assert int8(built)["result"]["metrics"]["closeness"] >= 0.8


def test_where_no_integers_keep_the_limit_it_ends_at_fp32_with_its_tries(hidden, tmp_path):
    project = copied(hidden, tmp_path)
    built, told = build(project, tmp_path / "x.edgeopt", project={"limits.metric_min": "{closeness: 0.99999}"})
    whats = [t.what for t in told.tries]
    assert whats[0] == "trained (QAT)" and "layers float" in whats[1]
    assert whats[2:] == ["fp16 or bf16", "onnxruntime-fp32"]
    assert [t.passed for t in told.tries] == [False, False, False, True]
    assert {c.precision for c in built.artifact.manifest.candidates} == {"fp32"}
    assert mixed(built)["setup"] is None and not mixed(built)["ended"]
    refused = {r.candidate: r.reason for r in built.artifact.manifest.refused}
    assert "closeness" in refused["onnxruntime-int8"]


@pytest.mark.slow
def test_with_hardly_any_time_the_best_so_far_ships_and_building_again_goes_on(hidden, tmp_path):
    project = copied(hidden, tmp_path)
    built, told = build(project, tmp_path / "x.edgeopt", budget_min=1e-6)
    assert "budget" in mixed(built)["ended"]
    assert {c.precision for c in built.artifact.manifest.candidates} == {"fp32"}
    assert not any(t.layers_float for t in told.tries)
    again, told = build(project, tmp_path / "x.edgeopt")
    assert mixed(again)["setup"]["names"] == ["bad"] and not mixed(again)["ended"]
    assert again.artifact.digest == hidden[1].artifact.digest


def test_a_budget_of_nothing_searches_nothing(hidden, tmp_path):
    built, told = build(copied(hidden, tmp_path), tmp_path / "x.edgeopt", budget_min=0)
    assert not told.tries and mixed(built) is None
    assert not int8(built)["kept"]


def until(project: Path, out: Path, line: Callable[[str], bool]) -> subprocess.Popen:
    """A build in a process of its own, up to the first line that `line` is true of."""
    argv = command(project, out)
    child = subprocess.Popen(
        [sys.executable, "-m", "edgeopt", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 600
    for said in child.stdout:
        if line(said):
            return child
        assert time.monotonic() < deadline
    raise AssertionError(child.stderr.read())


def is_first_try(said: str) -> bool:
    return "layers float" in said and "passes" in said


@pytest.mark.slow
def test_a_killed_search_goes_on_behind_its_last_try_and_gives_the_same(hidden, tmp_path):
    project, out = copied(hidden, tmp_path), tmp_path / "x.edgeopt"
    child = until(project, out, is_first_try)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert not out.exists()
    built, told = build(project, out)
    assert [t.resumed for t in told.tries if t.layers_float] == [True, False]
    assert built.artifact.digest == hidden[1].artifact.digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["project", "x.edgeopt"]


@pytest.mark.slow
def test_ctrl_c_in_the_search_ships_the_best_so_far(hidden, tmp_path):
    project, out = copied(hidden, tmp_path), tmp_path / "x.edgeopt"
    child = until(project, out, is_first_try)
    child.send_signal(signal.SIGINT)
    printed, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    record = json.loads((out / "build.json").read_text())
    assert record["mixed_precision"]["ended"] == "interrupted"
    assert len(record["mixed_precision"]["setup"]["keep"]) > 1
    manifest = Artifact.open(out).manifest
    assert "int8" in {c.precision for c in manifest.candidates}
    assert "the search is not at its end: interrupted" in err
    again, told = build(project, out)
    assert mixed(again)["setup"]["names"] == ["bad"]


TRAINING = """

def train():
    images, labels = bars(32, 2)
    for i in range(0, 32, 16):
        yield {"image": images[i : i + 16]}, labels[i : i + 16]
"""


@pytest.mark.slow
def test_after_training_calibration_is_tried_and_then_the_trained_weights_with_layers_float(tmp_path):
    project = mixed_project(tmp_path / "project", without=(), qat={"epochs": 1, "learning_rate": 1e-7})
    with open(project / "data.py", "a") as file:
        file.write(TRAINING)
    built, told = build(project, tmp_path / "x.edgeopt")
    assert told.tries[0].what == "per-channel weights, calibrated (PTQ)" and not told.tries[0].passed
    assert int8(built)["kept"] and mixed(built)["setup"]["names"] == ["bad"]
    assert float_weights(built.artifact) == ["bad.weight"]
    assert int8(built)["result"]["metrics"]["closeness"] >= 0.8
