"""Validate with real runtimes, on this machine, on a local place, and over a real sshd."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest

from edgeopt.errors import ArtifactError, DataError, DeviceError, ProjectError, SpaceError, ValidationError
from edgeopt.flows.place import locked
from edgeopt.flows.validate import How, Validated, latest_report, validate_at, validate_here
from edgeopt.ports.connect import connect
from edgeopt.ports.local import LocalConnection
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import Selection, Tolerance
from tests.tiny import candidate, onnx_model, tiny_artifact, weights

QUICK = How(python=sys.executable, rounds=2, calls=5)
PROJECT = """\
name: tiny
model: float.onnx
inputs: {x: {shape: [n, 4], dtype: float32}}
axes: {n: {min: 1, opt: 2, max: 8}}
evaluate: mine.py:evaluate
"""


@pytest.fixture
def project(tmp_path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "edgeopt.yaml").write_text(PROJECT)
    (folder / "mine.py").write_text("from tests.tiny import evaluate\n")
    onnx.save(onnx_model(), folder / "float.onnx")
    return folder / "edgeopt.yaml"


def with_project(project: Path | None, **how) -> How:
    return How(**{**vars(QUICK), "project": project, **how})


def small(folder: Path, **changes) -> Artifact:
    return tiny_artifact(folder, torchscript=False, **changes)


def verdicts(done: Validated) -> dict[str, str]:
    return {check.name: check.verdict for check in done.report.checks}


def test_every_candidate_is_measured_judged_and_the_fastest_selected(tmp_path, project):
    artifact = tiny_artifact(tmp_path)
    done = validate_here(artifact, with_project(project))

    report = done.report
    assert report.verdict == "pass" and report.host == "this machine" and report.digest == artifact.digest
    assert verdicts(done) == {
        f"{name}: {check}": "pass"
        for name in ("onnxruntime-fp32", "torchscript-fp32")
        for check in ("reference sqnr_db", "reference max_abs", "metric accuracy")
    }
    by_name = {c.name: c for c in report.candidates}
    for result in by_name.values():
        assert result.metrics == {"accuracy": 1.0} and result.calls == 10
        assert 0 < result.p50_ms <= result.p90_ms <= result.p99_ms
        assert result.peak_rss_mb > 10 and result.sqnr_db > 100
    assert report.chosen == done.selection.candidate == "onnxruntime-fp32"
    assert artifact.selection() == done.selection
    assert done.selection.decided_by == "validate" and done.selection.verdict == "faster"
    assert done.path.parent == artifact.folder / "reports"
    assert latest_report(artifact.folder) == report
    assert Artifact.open(artifact.folder).digest == artifact.digest  # reports and selection are outside of it
    done.check()


def test_limits_are_judged(tmp_path, project):
    limits = {"latency_ms": 1e-6, "peak_rss_mb": 1e5, "size_mb": 1.0}
    done = validate_here(small(tmp_path, limits=limits), with_project(project))
    assert done.report.verdict == "fail" and done.selection is None
    assert verdicts(done)["onnxruntime-fp32: latency_ms"] == "fail"
    assert verdicts(done)["onnxruntime-fp32: peak_rss_mb"] == verdicts(done)["onnxruntime-fp32: size_mb"] == "pass"
    assert done.path.is_file()
    assert not (tmp_path / "tiny.edgeopt" / "selection.json").exists()
    with pytest.raises(ValidationError, match="at most 1e-06 ms is asked for") as failed:
        done.check()
    assert failed.value.exit_code == 16 and str(done.path) in str(failed.value)


def wrong_model() -> bytes:
    """The network with its last bias shifted, so that its labels and outputs differ."""
    model = onnx_model()
    shifted = weights()["b2"] + [-50, 0, 50]
    for tensor in model.graph.initializer:
        if tensor.name == "b2":
            tensor.CopyFrom(onnx.numpy_helper.from_array(shifted.astype("float32"), "b2"))
    return model.SerializeToString()


def two_candidates(folder: Path, **changes) -> Artifact:
    """'wrong' first and 'right' second, both ONNX; 'wrong' has no tolerance, so that the metric must find it."""
    fields = {
        "extra": {"wrong.onnx": wrong_model()},
        "candidates": [
            candidate("wrong", "onnxruntime", "wrong.onnx").model_copy(update={"tolerance": Tolerance()}),
            candidate("right", "onnxruntime", "float.onnx"),
        ],
        **changes,
    }
    return small(folder, **fields)


def test_a_candidate_that_lost_the_metric_is_not_selected(tmp_path, project):
    done = validate_here(two_candidates(tmp_path / "a"), with_project(project))
    assert verdicts(done)["wrong: metric accuracy"] == "fail"
    assert done.report.verdict == "pass" and done.selection.candidate == "right"
    assert done.selection.verdict == "only" and list(done.selection.figures) == ["right"]


def test_without_evaluate_the_proxy_judges(tmp_path):
    artifact = two_candidates(tmp_path / "a", metrics={}, cases=(), cases_complete=False)
    done = validate_here(artifact, QUICK)
    assert verdicts(done)["wrong: proxy sqnr_db"] == "fail"
    assert verdicts(done)["right: proxy sqnr_db"] == "pass"
    assert done.report.verdict == "pass" and done.selection.candidate == "right"


def test_a_metric_that_cannot_be_replayed_is_undecided_and_says_what_to_do(tmp_path, project):
    done = validate_here(small(tmp_path / "a"), QUICK)
    (check,) = [c for c in done.report.checks if c.verdict != "pass"]
    assert check.verdict == done.report.verdict == "undecided"
    assert "the project is not at hand: give it with --project" in check.evidence
    assert done.selection.candidate == "onnxruntime-fp32"
    done.check()

    done = validate_here(small(tmp_path / "b", cases_complete=False), with_project(project))
    assert any("raise limits.cases_mb" in c.evidence for c in done.report.checks if c.verdict == "undecided")


def test_the_project_of_the_build_is_found(tmp_path, project):
    artifact = small(tmp_path)
    (artifact.folder / "build.json").write_text(json.dumps({"project": str(project)}))
    assert validate_here(artifact, QUICK).report.verdict == "pass"
    (artifact.folder / "build.json").write_text("no json")
    assert validate_here(artifact, QUICK).report.verdict == "undecided"


def test_an_evaluate_that_asks_for_other_inputs_is_refused(tmp_path, project):
    (project.parent / "mine.py").write_text(
        "import numpy as np\n"
        "def evaluate(predict):\n"
        "    predict({'x': np.ones((1, 4), 'float32')})\n"
        "    return {'accuracy': 1}\n"
    )
    with pytest.raises(DataError, match="not the one that was recorded"):
        validate_here(small(tmp_path), with_project(project))


def test_a_project_that_is_not_there_or_has_no_evaluate_is_refused(tmp_path, project):
    artifact = small(tmp_path)
    with pytest.raises(ProjectError, match="no such project file"):
        validate_here(artifact, with_project(tmp_path / "gone.yaml"))
    project.write_text(PROJECT.replace("evaluate: mine.py:evaluate\n", ""))
    with pytest.raises(DataError, match="the project has no evaluate"):
        validate_here(artifact, with_project(project))


def test_a_candidate_that_crashes_is_a_failure_and_the_other_is_selected(tmp_path, project):
    aborting = {"ops.py": b"import os\nos.abort()\n"}
    artifact = tiny_artifact(tmp_path, extra=aborting, op_libraries=["ops.py"])
    done = validate_here(artifact, with_project(project))
    assert done.report.verdict == "pass" and done.selection.candidate == "onnxruntime-fp32"
    (failed,) = [c for c in done.report.candidates if c.failure]
    assert failed.name == "torchscript-fp32" and failed.failure == "abort: the process ended by SIGABRT"


def test_an_engine_that_is_still_to_be_built_is_undecided(tmp_path, project):
    done = validate_here(small(tmp_path, candidates=[candidate("engine", "tensorrt", "float.onnx")]), QUICK)
    assert done.report.verdict == "undecided" and done.selection is None
    assert "no trtexec on its PATH" in done.report.reason  # nor a GPU
    done.check()


def test_a_device_without_the_runtime_is_said(tmp_path):
    import subprocess

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    bare = How(python=str(tmp_path / "bare" / "bin" / "python"))
    done = validate_here(small(tmp_path), bare)
    assert done.report.verdict == "fail" and done.path.is_file()
    with pytest.raises(DeviceError, match="the device has no onnxruntime: install onnxruntime") as missing:
        done.check()
    assert missing.value.exit_code == 15


def test_a_full_disk_of_the_device_is_said(tmp_path):
    """The device's folder for outputs is full: /dev/full stands in its place, put there by the 'python'."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nln -s /dev/full "$(dirname "$4")/out/onnxruntime-fp32.bin"\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    done = validate_here(small(tmp_path / "a"), How(python=str(python)))
    with pytest.raises(SpaceError, match="the disk of the device is full") as full:
        done.check()
    assert full.value.exit_code == 14


def test_a_report_that_cannot_be_written_is_said(tmp_path):
    artifact = small(tmp_path)
    (artifact.folder / "reports").write_text("in the way")
    with pytest.raises(ArtifactError, match="cannot write"):
        validate_here(artifact, QUICK)


def test_no_report_and_a_damaged_one_are_said(tmp_path):
    artifact = small(tmp_path)
    with pytest.raises(ArtifactError, match="no report yet"):
        latest_report(artifact.folder)
    (artifact.folder / "reports").mkdir()
    (artifact.folder / "reports" / "20260101T000000Z-x.json").write_text("{")
    with pytest.raises(ArtifactError, match="not JSON"):
        latest_report(artifact.folder)


def on_place(connection, root: Path, artifact: Artifact, how: How) -> Validated:
    with locked(connection, str(root), artifact.manifest.name) as place:
        return validate_at(place, artifact, how)


def test_a_release_is_pushed_where_it_lacks_and_the_selection_lies_beside_it(tmp_path, project):
    artifact = small(tmp_path)
    with LocalConnection() as connection:
        for _ in range(2):  # the second finds the release
            done = on_place(connection, tmp_path / "root", artifact, with_project(project))
    release = tmp_path / "root" / "tiny" / "releases" / artifact.digest
    assert Selection.model_validate_json((release / "selection.json").read_bytes()) == done.selection
    assert done.report.verdict == "pass"
    assert not (tmp_path / "root" / "tiny" / "current").exists()  # validate activates nothing
    assert Artifact.open(release).digest == artifact.digest


def test_over_ssh(tmp_path, project, sshd, ssh_config):
    artifact = small(tmp_path)
    with connect("device", config=ssh_config(sshd)) as connection:
        done = on_place(connection, tmp_path / "root", artifact, with_project(project))
    assert done.report.verdict == "pass" and done.report.host == connection.label != "this machine"
    assert ":" not in done.path.name and "@" not in done.path.name
    assert (tmp_path / "root" / "tiny" / "releases" / artifact.digest / "selection.json").is_file()


def test_a_device_of_another_architecture_proves_nothing(tmp_path, project):
    artifact = small(tmp_path, target={"kind": "jetson", "arch": "ia64"})
    done = validate_here(artifact, with_project(project))
    assert done.report.verdict == "undecided" and done.selection is not None
    (check,) = [c for c in done.report.checks if c.name == "target architecture"]
    assert "for ia64" in check.evidence and "nothing of the target" in check.evidence
    done.check()
