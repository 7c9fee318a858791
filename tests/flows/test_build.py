"""`edgeopt build` from end to end, each in a process of its own as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import edgeopt
from edgeopt.runtime.artifact import Artifact
from tests.mixed_project import mixed_project
from tests.small_project import BACKENDS, BUILD, run_edgeopt, write_project


def build(project: Path, out: Path, *options: str, profile: str = "x86-cpu") -> subprocess.CompletedProcess:
    return run_edgeopt("build", "--profile", profile, "--project", str(project), "--out", str(out), *options)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The project built once for x86-cpu: (project folder, artifact folder, what was printed)."""
    folder = tmp_path_factory.mktemp("build")
    project = write_project(folder / "project")
    done = build(project, folder / "bars.edgeopt")
    assert done.returncode == 0, done.stderr
    return project, folder / "bars.edgeopt", done.stdout


def record_of(artifact: Path) -> dict:
    return json.loads((artifact / "build.json").read_text())


def test_all_stages_run_and_say_what_they_did(built):
    _, artifact, printed = built
    stages = {stage["name"]: stage for stage in record_of(artifact)["stages"]}
    assert list(stages) == ["capture", "optimize", "qat", "quantize", "reoptimize"]
    assert all(stage["skipped"] is None for stage in stages.values())
    assert stages["capture"]["max_abs_error"] == 0
    assert stages["optimize"]["max_abs_error"] < 1e-5
    assert stages["optimize"]["nodes"] < stages["capture"]["nodes"]  # BN was folded
    assert 20 < stages["quantize"]["sqnr_db"] < 80  # int8, and not float by another name
    for name in stages:
        assert f"\n{name} " in "\n" + printed


def test_the_artifact_holds_float_and_int8_and_opens(built):
    _, folder, _ = built
    artifact = Artifact.open(folder)
    names = [c.name for c in artifact.manifest.candidates]
    assert names == ["onnxruntime-fp32", "torchscript-fp32", "onnxruntime-int8"]
    int8 = onnx.load(artifact.path(artifact.manifest.candidate("onnxruntime-int8").file))
    weights = {i.name: i.data_type for i in int8.graph.initializer if len(i.dims) == 4}
    assert set(weights.values()) == {onnx.TensorProto.INT8}
    assert artifact.manifest.cases_complete
    assert artifact.manifest.candidate("torchscript-fp32").tolerance.max_abs == 1e-3
    assert set(artifact.manifest.metrics) == {"reference", *names}
    assert (
        abs(artifact.manifest.metrics["onnxruntime-int8"]["p0"] - artifact.manifest.metrics["reference"]["p0"]) < 0.05
    )


def test_the_weights_keep_seven_bits_unless_the_profile_says_vnni(built, tmp_path):
    project, folder, _ = built

    def largest(artifact: Path) -> int:
        model = onnx.load(artifact / "int8.onnx")
        return max(
            int(abs(onnx.numpy_helper.to_array(i).astype(int)).max())
            for i in model.graph.initializer
            if i.data_type == onnx.TensorProto.INT8 and len(i.dims) == 4
        )

    assert 60 <= largest(folder) <= 64
    done = build(project, tmp_path / "vnni.edgeopt", "--set", "profile.target.vnni=true")
    assert done.returncode == 0, done.stderr
    assert 120 <= largest(tmp_path / "vnni.edgeopt") <= 128


def test_predict_gives_the_users_structure_and_the_models_answer(built):
    project, folder, _ = built
    spec = importlib.util.spec_from_file_location("bars_model", project / "model.py")
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    image = np.random.default_rng(0).normal(size=(3, 1, 12, 12)).astype(np.float32)
    expected = model.build().eval()(torch.from_numpy(image))["scores"].detach().numpy()
    for name, tolerance in (("onnxruntime-fp32", 1e-5), ("torchscript-fp32", 1e-5), ("onnxruntime-int8", 0.1)):
        with edgeopt.load(folder, name) as predictor:
            given = predictor.predict({"image": image})
        assert set(given) == {"scores"}
        assert abs(given["scores"] - expected).max() < tolerance


def test_the_same_inputs_give_the_same_digest_elsewhere_without_cache(built, tmp_path):
    project, folder, _ = built
    shutil.copytree(project, tmp_path / "copy", ignore=shutil.ignore_patterns(".edgeopt", "__pycache__"))
    done = build(tmp_path / "copy", tmp_path / "again.edgeopt", "--no-cache")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.edgeopt" / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()


def test_no_path_of_this_machine_is_in_the_artifact(built):
    project, folder, _ = built
    artifact = Artifact.open(folder)
    needles = [str(project).encode(), str(Path(edgeopt.__file__).parent).encode(), str(Path.home()).encode() + b"/"]
    for name in [*artifact.manifest.files, "manifest.json"]:
        data = artifact.path(name).read_bytes()
        for needle in needles:
            assert needle not in data, f"{needle} in {name}"


def test_an_unchanged_rebuild_imports_neither_torch_nor_user_code(built, tmp_path):
    project, folder, _ = built
    code = (
        "import sys, edgeopt.cli\n"
        "try: edgeopt.cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'onnx', 'onnxruntime', 'model', 'data'} & set(sys.modules)\n"
    )
    argv = ["build", "--profile", "x86-cpu", *BACKENDS, "--project", str(project), "--out"]
    for out in (folder, tmp_path / "other.edgeopt"):  # as it stands, and put back from the cache
        done = subprocess.run([sys.executable, "-c", code, *argv, str(out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "nothing has changed" in done.stdout
    assert Artifact.open(tmp_path / "other.edgeopt").digest == Artifact.open(folder).digest


def test_a_damaged_artifact_is_put_right_by_building_again(built, tmp_path):
    project, folder, _ = built
    shutil.copytree(folder, tmp_path / "damaged.edgeopt")
    (tmp_path / "damaged.edgeopt" / "int8.onnx").write_bytes(b"half")
    done = build(project, tmp_path / "damaged.edgeopt")
    assert done.returncode == 0, done.stderr
    assert Artifact.open(tmp_path / "damaged.edgeopt").digest == Artifact.open(folder).digest


def test_a_change_that_no_stage_reads_builds_from_the_cached_stages(built, tmp_path):
    project, _, _ = built
    shutil.copytree(project, tmp_path / "project")
    done = build(tmp_path / "project", tmp_path / "out.edgeopt", "--set", "project.limits.latency_ms=1000")
    assert done.returncode == 0, done.stderr
    assert "nothing has changed" not in done.stdout
    assert all(stage["cached"] for stage in record_of(tmp_path / "out.edgeopt")["stages"])


def test_cached_stages_give_the_same_bytes_as_new_ones(built, tmp_path):
    project, folder, _ = built
    shutil.copytree(project, tmp_path / "project")
    for made_of_stages in ("lower", "artifact", "baseline"):
        shutil.rmtree(tmp_path / "project" / ".edgeopt" / "cache" / made_of_stages)
    done = build(tmp_path / "project", tmp_path / "out.edgeopt")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.edgeopt" / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()


def test_a_killed_build_leaves_no_artifact_and_resumes_at_the_last_finished_stage(tmp_path):
    project = write_project(tmp_path / "project")
    out = tmp_path / "bars.edgeopt"
    argv = [*BUILD, "--project", str(project), "--out", str(out)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    deadline = time.monotonic() + 600
    for line in child.stdout:
        if line.startswith("optimize"):
            break
        assert time.monotonic() < deadline
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert not out.exists()
    done = build(project, out)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bars.edgeopt", "project"]  # the killed one's folder is gone
    cached = {stage["name"]: stage["cached"] for stage in record_of(out)["stages"]}
    assert cached["capture"] and cached["optimize"]
    assert not cached["reoptimize"]
    Artifact.open(out)


def test_until_stops_after_a_stage_and_leaves_no_artifact(built, tmp_path):
    project, _, _ = built
    done = build(project, tmp_path / "x.edgeopt", "--until", "optimize")
    assert done.returncode == 0, done.stderr
    assert "\noptimize " in done.stdout and "\nqat " not in done.stdout
    assert not (tmp_path / "x.edgeopt").exists()


def test_json_is_the_only_thing_on_stdout(built):
    project, folder, _ = built
    done = build(project, folder, "--json")
    record = json.loads(done.stdout, parse_constant=pytest.fail)  # Infinity and NaN are no JSON
    assert record["artifact"] == str(folder)
    json.loads((folder / "build.json").read_text(), parse_constant=pytest.fail)
    assert record["selection"]["candidate"] in [c["name"] for c in record["candidates"]]


def test_xavier_holds_onnx_that_its_tensorrt_parses_and_says_what_is_left(built, tmp_path):
    project, _, _ = built
    done = build(project, tmp_path / "xavier.edgeopt", profile="xavier")
    assert done.returncode == 0, done.stderr
    artifact = Artifact.open(tmp_path / "xavier.edgeopt")
    manifest = artifact.manifest
    for name in ("float.onnx", "int8.onnx"):
        model = onnx.load(artifact.path(name))
        assert [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")] == [17]
        onnx.checker.check_model(model, full_check=True)
    zero_points = [i for i in onnx.load(artifact.path("int8.onnx")).graph.initializer if "zero_point" in i.name]
    assert all(not onnx.numpy_helper.to_array(z).any() for z in zero_points)
    precisions = {c.precision for c in manifest.candidates if c.runtime == "tensorrt"}
    assert precisions >= {"fp16", "int8"}
    assert {r.candidate for r in manifest.engine_recipes} == {
        c.name for c in manifest.candidates if c.runtime == "tensorrt"
    }
    tolerances = {c.name: (c.tolerance.sqnr_db, c.tolerance.max_abs) for c in manifest.candidates}
    assert tolerances["tensorrt-fp32"] == (40, None) and tolerances["tensorrt-fp16"] == (30, None)
    assert 20 < tolerances["tensorrt-int8"][0] < 80
    recipe = manifest.engine_recipes[0]
    assert recipe.shapes["image"] == {"min": (1, 1, 12, 12), "opt": (1, 1, 12, 12), "max": (16, 1, 12, 12)}
    assert any(r.candidate == "torchscript-fp32" and "torch" in r.reason for r in manifest.refused)
    assert artifact.selection().verdict == "undecided"
    assert "left for the device: the TensorRT engine" in done.stdout
    assert "judged by onnxruntime here" in done.stdout


def test_jetpack_4_gets_opset_13(built, tmp_path):
    project, _, _ = built
    done = build(project, tmp_path / "nano.edgeopt", profile="nano")
    assert done.returncode == 0, done.stderr
    artifact = Artifact.open(tmp_path / "nano.edgeopt")
    model = onnx.load(artifact.path("float.onnx"))
    assert [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")] == [13]
    assert not any(c.precision == "int8" for c in artifact.manifest.candidates)
    assert any("int8" in r.candidate for r in artifact.manifest.refused)


def test_without_training_and_calibration_the_float_model_ships_and_says_what_to_add(tmp_path):
    project = write_project(tmp_path / "project", without=("train", "loss", "qat", "calibration", "evaluate", "limits"))
    done = build(project, tmp_path / "out.edgeopt")
    assert done.returncode == 0, done.stderr
    assert "add 'train' to the project" in done.stdout
    assert "add 'calibration: data.py:function' to the project" in done.stdout
    manifest = Artifact.open(tmp_path / "out.edgeopt").manifest
    assert {c.precision for c in manifest.candidates} == {"fp32"}
    assert "(proxy)" in done.stdout


def test_int8_that_loses_accuracy_is_dropped_with_its_reason(tmp_path):
    project = mixed_project(tmp_path / "project", "easy", least=1 - 1e-4)
    done = build(project, tmp_path / "out.edgeopt", "--budget", "0")
    assert done.returncode == 0, done.stderr
    manifest = Artifact.open(tmp_path / "out.edgeopt").manifest
    assert {c.precision for c in manifest.candidates} == {"fp32"}
    (refusal,) = [r for r in manifest.refused if r.candidate == "onnxruntime-int8"]
    assert "closeness" in refusal.reason and "at least" in refusal.reason
    assert not (tmp_path / "out.edgeopt" / "int8.onnx").exists()


def test_limits_that_nothing_keeps_leave_no_artifact(tmp_path):
    project = write_project(
        tmp_path / "project", without=("train", "loss", "qat", "calibration"), limits={"metric_min": {"p0": 2}}
    )
    done = build(project, tmp_path / "out.edgeopt")
    assert done.returncode == 9
    assert "no candidate can be shipped" in done.stderr and "p0" in done.stderr
    assert not (tmp_path / "out.edgeopt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["project"]  # no staging folder either


def test_an_interrupted_build_says_so_and_leaves_nothing(tmp_path):
    project = write_project(tmp_path / "project", without=("train", "loss", "qat"))
    argv = [*BUILD, "--project", str(project), "--out", str(tmp_path / "out.edgeopt")]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("capture"):
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["project"]
