"""The contenders of `edgeopt bench`: each really runs the user's model and gives its outputs."""

from __future__ import annotations

import numpy as np
import pytest

from edgeopt.backends import onnx_export
from edgeopt.capture.capture import capture
from edgeopt.errors import EdgeoptError
from edgeopt.pipeline.peers import PEERS, open_peer
from edgeopt.progress import SILENT
from edgeopt.spec.project import load_project

MODEL = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x, y):
        hidden = torch.relu(self.first(x)) + y
        return {"scores": self.second(hidden), "hidden": hidden}

def build():
    torch.manual_seed(7)
    return Net()

def calibration():
    rng = np.random.default_rng(1)
    for _ in range(4):
        yield {"x": rng.normal(size=(2, 4)).astype("float32"), "y": rng.normal(size=(2, 8)).astype("float32")}
"""
YAML = """
name: peers
model: model.py:build
inputs: {x: {shape: [n, 4]}, y: {shape: [n, 8]}}
axes: {n: {min: 1, opt: 2, max: 4}}
calibration: model.py:calibration
"""
CLOSE = {"onnxruntime-int8": 0.1, "openvino": 0.05}  # 8 bits; OpenVINO computes in bf16 by default where a CPU has it
NAMES = (["x", "y"], ["scores", "hidden"])


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    (folder / "model.py").write_text(MODEL)
    (folder / "edgeopt.yaml").write_text(YAML)
    return load_project(folder)


@pytest.fixture(scope="module")
def captured(project):
    return capture(project, progress=SILENT)


@pytest.fixture(scope="module")
def file(project, captured):
    return project.folder / onnx_export.write(captured, project.folder, opset_max=17).name


@pytest.mark.parametrize("kind", [kind for kind in PEERS if kind != "openvino-int8"])
def test_a_contender_gives_the_models_outputs_in_their_order(project, captured, file, kind):
    """compile and aoti take seconds each, in which a C++ compiler runs: that is what they are."""
    assert list(captured.signature.output_names) == NAMES[1]
    call = open_peer(kind, project, file if PEERS[kind] else None, arrays(0), NAMES)
    for seed in (1, 2):
        wanted = open_peer("eager", project, None, arrays(0), NAMES)(arrays(seed))
        found = call(arrays(seed))
        assert [f.shape for f in found] == [(2, 3), (2, 8)]
        for name, given, got in zip(NAMES[1], wanted, found, strict=True):
            assert np.abs(given - got).max() <= CLOSE.get(kind, 1e-5) * max(1, np.abs(given).max()), name


def test_a_contender_without_what_it_needs_says_so(project, file):
    with pytest.raises(EdgeoptError, match="gives no calibration data"):
        open_peer("onnxruntime-int8", project.model_copy(update={"calibration": None}), file, arrays(0), NAMES)


def arrays(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((2, 4), (2, 8))]
