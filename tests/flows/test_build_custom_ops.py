"""Whole builds of models with operators of the user's own: the artifact carries what its target loads, and it runs."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeopt.runtime.artifact import Artifact
from tests.native import ort_library, torch_library
from tests.small_project import BACKENDS, run_edgeopt, write_project

HERE = platform.machine()
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[HERE]
PROFILES = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}

OPS = '''
import torch

@torch.library.custom_op("bars_ops::gain", mutates_args=())
def gain(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """x times alpha."""
    return x * alpha

@gain.register_fake
def _(x, alpha):
    return torch.empty_like(x)
'''
GRADIENT = """
def backward(ctx, grad):
    return grad * ctx.alpha, None

def setup_context(ctx, inputs, output):
    ctx.alpha = inputs[1]

gain.register_autograd(backward, setup_context=setup_context)
"""
MODEL = """
import bars_ops

class Gained(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()
    def forward(self, image):
        x = self.net.first(image)
        x = bars_ops.gain(x, 0.5) + self.net.second(x)
        return {"scores": self.net.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))}

def gained():
    return Gained()
"""
MAPPED = {"bars_ops::gain": {"node": "acme::Scale", "onnxruntime": "native/libort.so"}}


def write(folder: Path, *, ops: str = OPS + GRADIENT, **keys) -> Path:
    """The project of small_project with the operator bars_ops::gain, and onnxruntime's library of acme::Scale.

    The operator's argument is called alpha, as the node's attribute is.
    """
    keys.setdefault("op_libraries", ["bars_ops.py"])
    write_project(folder, model_code=MODEL, **{"model": "model.py:gained", **keys})
    (folder / "bars_ops.py").write_text(ops)
    (folder / "native").mkdir(exist_ok=True)
    shutil.copy(ort_library(), folder / "native" / "libort.so")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Artifact, dict]:
    """The project's folder, its artifact with float and int8 candidates, and the build's report."""
    folder = write(tmp_path_factory.mktemp("custom-öps"), custom_ops=MAPPED)
    done = run_edgeopt("build", "--profile", PROFILES[HERE], "--json", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, Artifact.open(folder / "bars.edgeopt"), json.loads(done.stdout)


def test_every_runtime_has_a_candidate_and_its_libraries(built):
    _, artifact, _ = built
    manifest = artifact.manifest
    assert {c.name for c in manifest.candidates} == {"onnxruntime-fp32", "torchscript-fp32", "onnxruntime-int8"}
    assert manifest.op_libraries == ("ops/bars_ops.py", f"ops/{HERE}/libort.so")
    assert set(manifest.op_libraries) <= set(manifest.files)


def test_the_operator_is_one_float_node_in_both_files(built):
    """Its fake-quantize neighbours are Q/DQ in int8; the node itself takes and gives floats."""
    _, artifact, _ = built
    for name in ("float.onnx", "int8.onnx"):
        model = onnx.load(artifact.path(name))
        (node,) = [n for n in model.graph.node if n.domain == "acme"]
        sources = {value: n.op_type for n in model.graph.node for value in n.output}
        assert sources.get(node.input[0]) != "QuantizeLinear"


PREDICT = """
import sys, numpy
sys.path.insert(0, "onboard.pyz")
import onboard
assert not [name for name in sys.modules if name.startswith(("edgeopt", "bars_ops"))]
with onboard.load(".", candidate=sys.argv[1]) as predictor:
    print(predictor.predict({"image": numpy.load(sys.argv[2])})["scores"].tolist())
"""


def test_each_candidate_runs_in_a_fresh_process_without_edgeopt_and_the_model(built, tmp_path):
    """Case G09: saved, and loaded where the operators are known by the artifact's libraries alone."""
    folder, artifact, _ = built
    images = np.random.default_rng(0).normal(0, 0.3, (3, 1, 12, 12)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    wanted = eager(folder, tmp_path / "images.npy")
    for candidate in artifact.manifest.candidates:
        argv = [sys.executable, "-c", PREDICT, candidate.name, str(tmp_path / "images.npy")]
        done = subprocess.run(argv, cwd=artifact.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found = np.array(json.loads(done.stdout.splitlines()[-1]))
        np.testing.assert_allclose(found, wanted, atol=0.1 if candidate.precision == "int8" else 1e-4)


def eager(folder: Path, images: Path) -> np.ndarray:
    """The unoptimised model's scores, from a process of its own."""
    code = "import sys, numpy, torch, model\n"
    code += "print(model.gained().eval()(torch.from_numpy(numpy.load(sys.argv[1])))['scores'].tolist())"
    argv = [sys.executable, "-c", code, str(images)]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def test_without_its_libraries_the_artifact_is_none(built, tmp_path):
    _, artifact, _ = built
    copy = tmp_path / "copy.edgeopt"
    shutil.copytree(artifact.folder, copy)
    (copy / "ops" / "bars_ops.py").unlink()
    with pytest.raises(Exception, match="missing"):
        Artifact.open(copy)


def test_it_is_validated_with_the_libraries_of_the_artifact(built):
    folder, artifact, _ = built
    done = run_edgeopt("validate", str(artifact.folder), "--json", cwd=folder)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["verdict"] == "pass"
    assert all(candidate["failure"] is None for candidate in report["candidates"])


def test_cached_stages_are_read_with_the_operators_loaded(built, tmp_path):
    """A cached graph holds the operator; the artifact's own cache entry is gone, so that the stages are read."""
    folder, artifact, _ = built
    copy = tmp_path / "again"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("bars.edgeopt"))
    shutil.rmtree(copy / ".edgeopt" / "cache" / "artifact")
    done = run_edgeopt("build", "--profile", PROFILES[HERE], "--json", cwd=copy)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((copy / "bars.edgeopt" / "build.json").read_bytes())
    assert all(stage["cached"] or stage["skipped"] for stage in record["stages"])
    again = Artifact.open(copy / "bars.edgeopt")
    assert again.manifest.op_libraries == artifact.manifest.op_libraries


def test_a_fully_cached_build_runs_no_library(built, tmp_path):
    folder, _, _ = built
    code = "import sys, runpy\nsys.argv = ['edgeopt', 'build', '--profile', *sys.argv[1:]]\n"
    code += "try:\n    runpy.run_module('edgeopt', run_name='__main__')\n"
    code += "except SystemExit as end:\n    assert not end.code\n"
    code += "print([m for m in ('torch', 'bars_ops', 'onnxruntime') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, PROFILES[HERE], *BACKENDS], cwd=folder, capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_without_a_gradient_training_is_refused_with_the_operators_name(tmp_path):
    folder = write(tmp_path / "project", ops=OPS)
    done = run_edgeopt("build", "--profile", PROFILES[HERE], cwd=folder)
    assert done.returncode == 8
    assert "bars_ops::gain has no gradient" in done.stderr and "register_autograd" in done.stderr
    assert "model.py, line" in done.stderr


def test_the_target_gets_the_library_for_its_own_machine(tmp_path):
    """Built for another machine: this one's library proves the files, the artifact holds the other's."""
    libraries = ["native/libort.so", f"native/libort-{OTHER}.so"]
    mapped = {"bars_ops::gain": {"node": "acme::Scale", "onnxruntime": libraries}}
    folder = write(tmp_path / "project", custom_ops=mapped, without=("train", "loss", "calibration", "qat"))
    shutil.copy(ort_library(OTHER), folder / libraries[1])
    done = run_edgeopt("build", "--profile", PROFILES[OTHER], cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = Artifact.open(folder / "bars.edgeopt").manifest
    assert f"ops/{OTHER}/libort-{OTHER}.so" in manifest.op_libraries
    assert not [name for name in manifest.files if HERE in name]


def test_no_backend_that_can_load_the_library_is_refused_before_any_work(tmp_path):
    folder = write(tmp_path / "project", op_libraries=["bars_ops.py", "libnative.so"])
    shutil.copy(torch_library(), folder / "libnative.so")
    only = ("--set", "profile.backends=[torchscript]", "--set", "profile.precision.allowed=[fp32]")
    done = run_edgeopt("build", "--profile", PROFILES[OTHER], *only, cwd=folder)
    assert done.returncode == 4
    assert f"there is no library for {OTHER}" in done.stderr and f"libnative.so is for {HERE}" in done.stderr
    assert not (folder / ".edgeopt").exists()


def test_no_library_for_the_machine_that_builds_is_refused_before_any_work(tmp_path):
    folder = write(tmp_path / "project", op_libraries=["bars_ops.py", "libnative.so"])
    shutil.copy(torch_library(OTHER), folder / "libnative.so")
    done = run_edgeopt("build", "--profile", PROFILES[OTHER], cwd=folder)
    assert done.returncode == 4
    assert f"there is no library for {HERE}" in done.stderr and "the machine that builds" in done.stderr
    assert not (folder / ".edgeopt").exists()
