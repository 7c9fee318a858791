"""examples/attention from end to end: the rule's operator, compiled and in Python, loaded by a fresh process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
from tests.conftest import absent
from tests.small_project import run_edgeopt

EXAMPLE = Path(__file__).parents[2] / "examples" / "attention"
LIBRARY = f"libfused_attention-{platform.machine()}.so"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The example's folder, copied, with its operator compiled by a real compiler."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        absent("no C++ compiler (Debian: g++)")
    folder = tmp_path_factory.mktemp("attention") / "project"
    ignored = shutil.ignore_patterns(".edgeopt", "__pycache__", "*.so", "*.edgeopt")
    shutil.copytree(EXAMPLE, folder, ignore=ignored)
    done = subprocess.run([sys.executable, "build_ops.py"], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / LIBRARY) and not done.stderr
    return folder


def _built(project: Path, library: str) -> tuple[Artifact, dict]:
    out = project.parent / f"{library}.edgeopt"
    done = run_edgeopt(
        "build", "--profile", "x86-cpu", "--project", str(project), "--out", str(out),
        "--set", f"project.op_libraries=[{library}]", timeout_s=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Artifact.open(out), json.loads((out / "build.json").read_text())


@pytest.fixture(scope="module")
def compiled(project):
    return _built(project, LIBRARY)


@pytest.fixture(scope="module")
def in_python(project):
    return _built(project, "ops.py")


def _passes(record: dict) -> dict[str, dict]:
    optimize = next(stage for stage in record["stages"] if stage["name"] == "optimize")
    return {found["name"]: found for found in optimize["details"]["passes"]}


def _frames() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = ((1, 8), (1, 64), (3, 37), (8, 512))
    return [rng.normal(size=(batch, time, 40)).astype(np.float32) for batch, time in sizes]


def _answers(code: str, folder: Path, *argv: str) -> list[np.ndarray]:
    """What `answer`, which the code defines, gives for the frames in a fresh process with no path but what it adds."""
    frames, answers = folder / "frames.npz", folder / "answers.npz"
    np.savez(frames, *_frames())
    script = (
        f"import sys, numpy as np\n{code}\n"
        f"given = np.load({str(frames)!r})\n"
        f"np.savez({str(answers)!r}, *[answer(given[name]) for name in given.files])\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script, *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with np.load(answers) as stored:
        return [stored[name] for name in stored.files]


@pytest.fixture(scope="module")
def eager(project) -> list[np.ndarray]:
    """The model's own answers, as the user runs it: no rule, no operator."""
    code = (
        "import torch\nsys.path.insert(0, sys.argv[1])\nfrom model import build\nmodel = build().eval()\n"
        "def answer(x):\n    with torch.no_grad(): return model(torch.from_numpy(x))['scores'].numpy()"
    )
    return _answers(code, project.parent, str(project))


ON_DEVICE = (
    "sys.path.insert(0, sys.argv[1] + '/onboard.pyz')\nimport onboard\n"
    "program = onboard.load(sys.argv[1], sys.argv[2])\n"
    "def answer(x): return program.predict({'frames': x})['scores']"
)


@pytest.mark.parametrize("which", ["compiled", "in_python"])
def test_both_layers_call_the_operator_and_the_answer_is_the_models(which, request, eager, tmp_path):
    artifact, record = request.getfixturevalue(which)
    made = _passes(record)["rule:fused_attention"]
    assert (made["status"], made["changed"]) == ("applied", 2), made
    assert made["max_abs_error"] < 1e-5
    candidate = artifact.manifest.candidate("torchscript-fp32")
    with zipfile.ZipFile(artifact.path(candidate.file)) as archive:
        code = "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".py"))
    assert code.count("custom_ops.fused_attention(") == 2 and "softmax" not in code
    for got, wanted in zip(_answers(ON_DEVICE, tmp_path, str(artifact.folder), candidate.name), eager, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_library_travels_with_the_artifact(compiled, in_python):
    for (artifact, _), name in ((compiled, LIBRARY), (in_python, "ops.py")):
        assert [Path(file).name for file in artifact.manifest.op_libraries] == [name]
        assert set(artifact.manifest.op_libraries) <= set(artifact.manifest.files)


def test_the_onnx_candidate_has_the_operator_in_onnxs_own_words(compiled, eager, tmp_path):
    artifact, _ = compiled
    candidate = artifact.manifest.candidate("onnxruntime-fp32")
    model = onnx.load(artifact.path(candidate.file))
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    assert sum(node.op_type == "Softmax" for node in model.graph.node) == 2
    for got, wanted in zip(_answers(ON_DEVICE, tmp_path, str(artifact.folder), candidate.name), eager, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_examples_own_tests_pass(project):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rules.py"],
        cwd=project, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("library", [LIBRARY, "ops.py"])
def test_the_operator_is_attention_at_every_size(project, tmp_path, library):
    """Blocks of queries, one product for all heads, nothing at all, views: against float64."""
    code = """
import math, sys, torch
if sys.argv[1].endswith(".py"):
    sys.path.insert(0, ".")
    import ops
else:
    torch.ops.load_library("./" + sys.argv[1])
LONG = (4, 1100, 16)  # more than one block of queries, and more than one product takes
for q, k, v in [((1, 1, 4),) * 3, ((2, 3, 7, 5), (2, 3, 9, 5), (2, 3, 9, 6)), ((4, 900, 16), LONG, LONG),
                ((2, 0, 4), (2, 3, 4), (2, 3, 4)), ((0, 3, 4),) * 3, ((3, 2), (5, 2), (5, 2))]:
    q, k, v = (torch.randn(shape) for shape in (q, k, v))
    for views in (False, True):
        if views:
            q, k, v = (torch.stack([x, x], -1)[..., 0] for x in (q, k, v))
        got = torch.ops.custom_ops.fused_attention(q, k, v)
        a, b, c = (x.double() for x in (q, k, v))
        wanted = torch.softmax(a @ b.mT / math.sqrt(q.shape[-1]), -1) @ c
        assert got.shape == wanted.shape and got.is_contiguous(), (got.shape, wanted.shape)
        assert got.numel() == 0 or (got - wanted).abs().max() < 1e-5
        results = torch.library.opcheck(torch.ops.custom_ops.fused_attention.default, (q, k, v),
                                        test_utils=("test_schema", "test_faketensor"))
"""
    done = subprocess.run([sys.executable, "-c", code, library], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_list_of_rules_counts_from_optimize_on_and_their_code_from_the_start(project, tmp_path):
    def keys(folder: Path, rules: str) -> dict[str, str]:
        loaded = load_project(folder, {"rules": rules, "op_libraries": "[ops.py]"})
        return stage_keys(Job(load_profile("x86-cpu"), loaded, folder / ".edgeopt"))

    shutil.copytree(project, tmp_path / "p", ignore=shutil.ignore_patterns(".edgeopt", "*.edgeopt"))
    before, without = keys(tmp_path / "p", "[rules.py:fused_attention]"), keys(tmp_path / "p", "[]")
    assert before["capture"] == without["capture"] and before["optimize"] != without["optimize"]
    with (tmp_path / "p" / "rules.py").open("a") as file:
        file.write("\n# edited\n")
    edited = keys(tmp_path / "p", "[rules.py:fused_attention]")
    assert all(edited[stage] != before[stage] for stage in before)
