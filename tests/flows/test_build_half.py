"""`edgeopt build` with fp16 and bf16 allowed: files beside those of fp32 and int8, which stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgeopt
from edgeopt.runtime.artifact import Artifact
from tests.passes.half_support import stored_types
from tests.small_project import run_edgeopt, write_project

ALLOWED = "profile.precision.allowed=[fp32, fp16, bf16, int8]"
WITHOUT = ("train", "loss", "qat")


def build(project: Path, out: Path, *options: str, profile: str = "x86-cpu"):
    done = run_edgeopt("build", "--profile", profile, "--project", str(project), "--out", str(out), *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stages_of(artifact: Path) -> dict[str, dict]:
    return {stage["name"]: stage for stage in json.loads((artifact / "build.json").read_text())["stages"]}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(project, artifact with 16-bit candidates, what was printed)."""
    folder = tmp_path_factory.mktemp("half")
    project = write_project(folder / "project", without=WITHOUT)
    printed = build(project, folder / "half.edgeopt", "--set", ALLOWED)
    return project, folder / "half.edgeopt", printed


def test_each_backend_has_the_precisions_that_its_target_runs(built):
    _, folder, printed = built
    manifest = Artifact.open(folder).manifest
    files = {c.name: c.file for c in manifest.candidates}
    assert files == {
        "onnxruntime-fp32": "float.onnx", "torchscript-fp32": "float.pt", "onnxruntime-fp16": "float16.onnx",
        "torchscript-bf16": "bfloat16.pt", "onnxruntime-int8": "int8.onnx",
    }  # fmt: skip
    reasons = {r.candidate: r.reason for r in manifest.refused}
    assert "no fp16 kernels" in reasons["torchscript-fp16"] and "no bf16 kernels" in reasons["onnxruntime-bf16"]
    tolerances = {c.name: c.tolerance.sqnr_db for c in manifest.candidates}
    assert (tolerances["onnxruntime-fp16"], tolerances["torchscript-bf16"]) == (38, 20)
    assert set(manifest.metrics) == {"reference", *files}
    assert Artifact.open(folder).selection().candidate in files
    for name in ("onnxruntime-fp16", "torchscript-bf16"):
        assert f"\n  {name}" in printed and "kept" in printed.split(f"\n  {name}")[1].splitlines()[0]


def test_the_stages_say_what_they_did(built):
    _, folder, printed = built
    stages = stages_of(folder)
    assert list(stages) == ["capture", "optimize", "fp16", "bf16", "qat", "quantize", "reoptimize"]
    for name, bits in (("fp16", 38), ("bf16", 20)):
        half = stages[name]["details"]["half"]
        assert half["refused"] is None and half["sqnr_db"] > bits
        assert half["bytes_after"] == stages[name]["size_bytes"] < 0.6 * stages["optimize"]["size_bytes"]
        assert f"{half['in_half']} of {half['operators']} operators in {name}" in printed
        assert half["half_modules"] and half["casts"] >= 2
        assert bits < stages[name]["sqnr_db"] < 90  # 16 bits, and not float by another name


def test_the_file_stores_fp16_and_the_interface_is_fp32(built):
    _, folder, _ = built
    stored = stored_types(folder / "float16.onnx")
    assert stored["FLOAT16"] > 10 * stored.get("FLOAT", 0)
    model = onnx.load(folder / "float16.onnx")
    types = {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    assert types == {onnx.TensorProto.FLOAT}
    image = np.random.default_rng(0).normal(size=(3, 1, 12, 12)).astype(np.float32)
    answers = {}
    for name in ("onnxruntime-fp32", "onnxruntime-fp16", "torchscript-bf16"):
        with edgeopt.load(folder, name) as predictor:
            answers[name] = predictor.predict({"image": image})["scores"]
    assert all(a.dtype == np.float32 for a in answers.values())
    assert 0 < abs(answers["onnxruntime-fp16"] - answers["onnxruntime-fp32"]).max() < 5e-3
    assert 0 < abs(answers["torchscript-bf16"] - answers["onnxruntime-fp32"]).max() < 5e-2


def test_the_fp32_and_the_integer_files_are_those_of_a_build_without(built, tmp_path):
    project, folder, _ = built
    printed = build(project, tmp_path / "plain.edgeopt")
    plain = Artifact.open(tmp_path / "plain.edgeopt")
    assert [c.name for c in plain.manifest.candidates] == ["onnxruntime-fp32", "torchscript-fp32", "onnxruntime-int8"]
    for name in ("float.onnx", "float.pt", "int8.onnx"):
        assert plain.path(name).read_bytes() == (folder / name).read_bytes()
    assert not {"fp16", "bf16"} & set(stages_of(plain.folder)) and "fp16" not in printed


def test_a_rebuild_takes_the_stages_from_the_cache_and_gives_the_same_bytes(built, tmp_path):
    project, folder, _ = built
    build(project, tmp_path / "again.edgeopt", "--set", ALLOWED, "--set", "project.limits.latency_ms=1000")
    assert all(stage["cached"] or stage["skipped"] for stage in stages_of(tmp_path / "again.edgeopt").values())
    for name in ("float16.onnx", "bfloat16.pt"):
        assert (tmp_path / "again.edgeopt" / name).read_bytes() == (folder / name).read_bytes()


def test_a_branch_runs_alone_and_later_stages_do_not_see_it(built):
    project, _, _ = built
    for until, absent in (("bf16", "fp16"), ("quantize", "bf16")):
        done = run_edgeopt(
            "build", "--profile", "x86-cpu", "--project", str(project), "--set", ALLOWED, "--until", until
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"\n{until} " in done.stdout and f"\n{absent} " not in done.stdout


def test_a_precision_that_fails_costs_the_candidate_and_not_the_build(tmp_path):
    model = (
        "\nclass Difference(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, 12)\n"
        "        self.other.load_state_dict({k: v * (1 + 1e-5) for k, v in self.one.state_dict().items()})\n"
        "    def forward(self, image):\n"
        "        return {'scores': (self.one(image) - self.other(image)).flatten(1)}\n"
        "def difference():\n"
        "    torch.manual_seed(0)\n"
        "    return Difference()\n"
    )
    project = write_project(
        tmp_path / "project", without=(*WITHOUT, "evaluate", "limits", "calibration"), model_code=model,
        model="model.py:difference",
    )  # fmt: skip
    printed = build(project, tmp_path / "out.edgeopt", "--set", "profile.precision.allowed=[fp32, fp16]")
    manifest = Artifact.open(tmp_path / "out.edgeopt").manifest
    reason = next(r.reason for r in manifest.refused if r.candidate == "onnxruntime-fp16")
    assert "SQNR" in reason and "no convolution or matrix product can be in fp16" in reason
    assert "refused: output 'scores'" in printed
    assert {c.precision for c in manifest.candidates} == {"fp32"}


def test_a_strongly_typed_tensorrt_gets_a_file_in_fp16(built, tmp_path):
    project, _, _ = built
    allowed = ("--set", "profile.precision.allowed=[fp32, fp16]")
    printed = build(project, tmp_path / "desktop.edgeopt", *allowed, profile="desktop-cuda")
    manifest = Artifact.open(tmp_path / "desktop.edgeopt").manifest
    assert {c.name: c.file for c in manifest.candidates if c.precision == "fp16"} == {
        "tensorrt-fp16": "float16.onnx", "onnxruntime-fp16": "float16.onnx", "torchscript-fp16": "float16.pt"
    }  # fmt: skip
    assert {(r.candidate, r.typing, r.flags) for r in manifest.engine_recipes} == {
        ("tensorrt-fp32", "strong", ()), ("tensorrt-fp16", "strong", ())
    }  # fmt: skip
    (line,) = [line for line in printed.splitlines() if line.startswith("  tensorrt-fp16")]
    assert "judged by onnxruntime here" in line and "in fp32" not in line  # the file in fp16 was run
