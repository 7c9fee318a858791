"""Models captured with a camera before them: reference outputs are the user's model on the documented arithmetic."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from edgeopt.capture.capture import capture, unoptimised
from edgeopt.errors import DataError
from edgeopt.program import ExportedGraph, ScriptGraph, predict
from edgeopt.program.frames import reference
from edgeopt.progress import SILENT
from edgeopt.spec.project import load_project

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    """image [n, 3, h, w] -> {"scores": [n, 4]}; `kind` says what is in the way of torch.export."""
    def __init__(self, kind=""):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.last = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 4)
    def forward(self, image):
        y = self.last(torch.relu(self.first(image)).mean((2, 3)))
        if self.kind == "branch":
            if bool(image.sum() > 0):
                y = y * 2
        if self.kind == "written":
            image.mul_(2)
        return {"scores": y}

def plain():
    return Net()
def branch():
    return Net("branch")
def written():
    return Net("written")
'''
IMAGENET = {"color": "BGR", "scale": "1/255", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def project(folder, camera, model="plain", shape=("n", 3, 16, 20), **more):
    (folder / "model.py").write_text(MODEL)
    axes = {a: {"min": 10, "opt": 33, "max": 40} for a in ("h", "w") if a in (*shape, *camera.get("size", ()))}
    values = {
        "name": "x", "model": f"model.py:{model}", "inputs": {"image": {"shape": list(shape), "camera": camera}},
        "axes": {"n": {"min": 1, "opt": 1, "max": 4}, **axes}, **more,
    }  # fmt: skip
    (folder / "edgeopt.yaml").write_text(json.dumps(values))
    return load_project(folder)


@pytest.mark.parametrize(
    ("camera", "model", "shape", "kind"),
    [
        (IMAGENET, "plain", ("n", 3, 16, 20), ExportedGraph),
        ({**IMAGENET, "layout": "CHW"}, "plain", ("n", 3, "h", "w"), ExportedGraph),
        ({**IMAGENET, "size": [33, 50], "fit": "letterbox"}, "plain", ("n", 3, 16, 20), ExportedGraph),
        ({**IMAGENET, "size": ["h", "w"]}, "plain", ("n", 3, 16, 20), ExportedGraph),
        ({**IMAGENET, "size": ["h", "w"]}, "branch", ("n", 3, 16, 20), ScriptGraph),
        ({**IMAGENET, "size": [33, 50], "fit": "crop"}, "branch", ("n", 3, 16, 20), ScriptGraph),
        ({"mean": 127, "std": 128}, "written", ("n", 3, 16, 20), ExportedGraph),
    ],
)
def test_the_program_takes_frames(camera, model, shape, kind, tmp_path):
    found = load = project(tmp_path, camera, model, shape)
    program = capture(load, progress=SILENT)
    assert isinstance(program, kind)
    spec = found.inputs["image"]
    assert [(s.dtype, s.shape) for s in program.signature.inputs] == [("uint8", spec.given_shape)]
    for call in program.reference:
        frames = call.inputs["image"]
        assert frames.dtype == np.uint8
        prepared = reference(frames, spec.camera, spec.shape)
        net = unoptimised(found).module.eval()
        with torch.no_grad():
            wanted = net(torch.from_numpy(prepared.copy()))["scores"].numpy()
        np.testing.assert_array_equal(call.outputs["scores"], wanted)
        given = predict.predictor(program)(call.inputs)["scores"]
        np.testing.assert_allclose(given, wanted, atol=1e-5)


def test_calibration_gives_frames_and_what_else_it_gives_is_named(tmp_path):
    code = "import numpy as np\ndef frames():\n    yield {'image': np.zeros((2, 16, 20, 3), np.uint8)}\n"
    code += "def floats():\n    yield {'image': np.zeros((2, 3, 16, 20), np.float32)}\n"
    (tmp_path / "data.py").write_text(code)
    program = capture(project(tmp_path, IMAGENET, calibration="data.py:frames"), progress=SILENT)
    assert program.reference[0].inputs["image"].shape == (1, 16, 20, 3)
    with pytest.raises(DataError, match="float32 where uint8 is declared") as caught:
        capture(project(tmp_path, IMAGENET, calibration="data.py:floats"), progress=SILENT)
    assert "camera" in caught.value.todo
