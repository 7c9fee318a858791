"""Builds with every CPU backend that needs no compiler, and on a machine that lacks one of them."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from edgeopt.runtime.artifact import Artifact
from tests.small_project import run_edgeopt, write_project

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the profile is x86-cpu")


def record_of(artifact: Path) -> dict:
    return json.loads((artifact / "build.json").read_text())


def test_every_backend_is_a_candidate_and_openvino_runs_the_integers_on_integers(tmp_path):
    project = write_project(tmp_path / "project", without=("train", "loss", "qat"))
    done = run_edgeopt(
        "build", "--profile", "x86-cpu", "--project", str(project), "--out", str(tmp_path / "out"),
        "--set", "profile.backends=[onnxruntime, openvino, torchscript]", "--set", "profile.fuser.trials=on",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path / "out")
    rows = {row["name"]: row for row in record["candidates"]}
    assert {"onnxruntime-fp32", "openvino-fp32", "torchscript-fp32", "onnxruntime-int8", "openvino-int8"} <= set(rows)
    assert "torchscript-fp32-onednn" in {
        *rows,
        *(r.candidate for r in Artifact.open(tmp_path / "out").manifest.refused),
    }
    for row in rows.values():
        assert row["result"]["failure"] is None, row
    assert rows["openvino-fp32"]["result"]["max_abs_error"] < 1e-4  # fp32, and not the bf16 of a CPU with AMX
    facts = rows["openvino-int8"]["facts"]
    assert facts["runtime"] == "openvino" and facts["integer"]["Convolution"] == 2
    checks = {check["name"]: check["verdict"] for check in rows["openvino-int8"]["checks"]}
    assert checks["integer kernels"] == "pass"


def without(package: str, folder: Path) -> str:
    """A real environment of this interpreter with everything that is installed here but `package`."""
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.lower().startswith(package):
            (site / entry.name).symlink_to(entry)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    return str(folder / "bin" / "python")


def test_a_machine_without_openvino_drops_it_in_a_sentence_and_builds(tmp_path):
    python = without("openvino", tmp_path / "env")
    found = subprocess.run([python, "-c", "import numpy, openvino"], capture_output=True, text=True, timeout=60)
    assert "No module named 'openvino'" in found.stderr
    project = write_project(tmp_path / "project", without=("train", "loss", "qat"))
    argv = [
        python, "-m", "edgeopt", "build", "--profile", "x86-cpu", "--project", str(project),
        "--out", str(tmp_path / "out"), "--set", "profile.backends=[onnxruntime, openvino]",
        "--set", "profile.precision.allowed=[fp32]",
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    manifest = Artifact.open(tmp_path / "out").manifest
    assert [c.name for c in manifest.candidates] == ["onnxruntime-fp32"]
    reasons = {r.candidate: r.reason for r in manifest.refused}
    assert reasons["openvino-fp32"] == "missing-runtime: the device has no openvino: install openvino with pip"


def test_bf16_of_another_cpu_is_judged_here_in_fp32_and_said_so(tmp_path):
    project = write_project(tmp_path / "project", without=("train", "loss", "qat", "calibration"))
    done = run_edgeopt(
        "build", "--profile", "x86-cpu", "--project", str(project), "--out", str(tmp_path / "out"),
        "--set", "profile.backends=[openvino]", "--set", "profile.precision.allowed=[fp32, bf16]",
        "--set", "profile.target.cpu_features=[avx2, amx_bf16, avx1024]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "judged by openvino here in fp32" in done.stdout + done.stderr
    rows = {row["name"]: row for row in record_of(tmp_path / "out")["candidates"]}
    assert rows["openvino-bf16"]["result"]["failure"] is None
    assert rows["openvino-bf16"]["result"]["max_abs_error"] == rows["openvino-fp32"]["result"]["max_abs_error"]
    shipped = {c.name: c for c in Artifact.open(tmp_path / "out").manifest.candidates}
    assert shipped["openvino-bf16"].flags["inference_precision"] == "bf16"
    assert shipped["openvino-bf16"].tolerance.sqnr_db == 20
