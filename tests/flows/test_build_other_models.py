"""Builds of what is no plain exported conv net: recurrent, ONNX and TorchScript models, structured outputs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import edgeopt
from edgeopt.runtime.artifact import Artifact
from tests.small_project import run_edgeopt

RECURRENT = '''
import torch
from torch import nn

class Tagger(nn.Module):
    """frames [n, t, 6] -> tags [n, t, 3], and the last state; t varies."""
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 10, batch_first=True)
        self.head = nn.Linear(10, 3)
    def forward(self, frames):
        x, state = self.gru(frames)
        return self.head(x), {"state": state, "nothing": None}

def build():
    torch.manual_seed(0)
    return Tagger()
'''


def project(folder: Path, files: dict[str, str], **values) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "edgeopt.yaml").write_text(json.dumps(values))
    return folder


def build(folder: Path, out: Path, *argv: str, profile: str = "x86-cpu") -> str:
    done = run_edgeopt("build", *argv, "--profile", profile, "--project", str(folder), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagger")
    values = {
        "name": "tagger",
        "model": "model.py:build",
        "inputs": {"frames": {"shape": ["n", "t", 6], "values": [-1, 1]}},
        "axes": {"n": {"min": 1, "opt": 1, "max": 4}, "t": {"min": 2, "opt": 10, "max": 50}},
    }
    printed = build(project(folder / "project", {"model.py": RECURRENT}, **values), folder / "tagger.edgeopt")
    return folder / "tagger.edgeopt", printed


def test_a_recurrent_model_of_varying_length_is_captured_and_says_how(tagger):
    folder, printed = tagger
    capture = json.loads((folder / "build.json").read_text())["stages"][0]
    assert capture["details"]["how"] == "torch.export with scripted parts (1)"
    notes = " ".join(capture["details"]["notes"])
    assert "kept as TorchScript in the graph: 'gru' (GRU)" in notes
    assert "captured by torch." in printed
    assert "int8" in printed  # why there is none


@pytest.mark.parametrize("candidate", ["onnxruntime-fp32", "torchscript-fp32"])
@pytest.mark.parametrize(("n", "t"), [(1, 2), (3, 17), (4, 50)])
def test_it_gives_the_models_answer_and_structure_at_every_length(tagger, candidate, n, t):
    folder, _ = tagger
    namespace: dict = {}
    exec(RECURRENT, namespace)
    frames = np.random.default_rng(t).uniform(-1, 1, (n, t, 6)).astype(np.float32)
    with torch.no_grad():
        tags, more = namespace["build"]().eval()(torch.from_numpy(frames))
    with edgeopt.load(folder, candidate) as predictor:
        given = predictor.predict({"frames": frames})
    assert isinstance(given, tuple) and list(given[1]) == ["state", "nothing"] and given[1]["nothing"] is None
    np.testing.assert_allclose(given[0], tags.numpy(), atol=1e-5)
    np.testing.assert_allclose(given[1]["state"], more["state"].numpy(), atol=1e-5)


def onnx_file(path: Path) -> np.ndarray:
    weight = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["rows", "w"], ["h"]), helper.make_node("Relu", ["h"], ["scores"])], "g",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["N", 5])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return weight


def test_an_onnx_file_builds_without_a_project(tmp_path):
    (tmp_path / "project").mkdir()
    weight = onnx_file(tmp_path / "project" / "net.onnx")
    printed = build(tmp_path / "project", tmp_path / "net.edgeopt", "net.onnx")
    assert "no calibration is given" in printed  # with one it is quantized: test_build_onnx
    artifact = Artifact.open(tmp_path / "net.edgeopt")
    assert [c.name for c in artifact.manifest.candidates] == ["onnxruntime-fp32"]
    rows = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    with edgeopt.load(artifact.folder) as predictor:
        given = predictor.predict({"rows": rows})
    (scores,) = given.values() if isinstance(given, dict) else (given,)
    np.testing.assert_allclose(scores, np.maximum(rows @ weight, 0), atol=1e-5)


def test_a_torchscript_file_builds_with_its_project(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool(x.sum() > 0) else x - 1

    folder = project(
        tmp_path / "project", {}, name="branch", model="branch.pt",
        inputs={"x": {"shape": ["n", 3], "values": [-1, 1]}}, axes={"n": {"min": 1, "opt": 1, "max": 8}},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is what is tried here
        torch.jit.script(Net()).save(str(folder / "branch.pt"))
    printed = build(folder, tmp_path / "branch.edgeopt")
    assert "left out: the model was captured as TorchScript" in printed
    with edgeopt.load(tmp_path / "branch.edgeopt", "torchscript-fp32") as predictor:
        for x in (np.float32([[1, 2, 3]]), np.float32([[-1, -2, -3]])):  # both branches are kept
            np.testing.assert_allclose(predictor.predict({"x": x}), x * 2 if x.sum() > 0 else x - 1)
