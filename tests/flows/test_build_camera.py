"""A build that takes frames and gives classes, from the project's data to the predictor on a device."""

from __future__ import annotations

import json

import numpy as np
import pytest

import edgeopt
from edgeopt import onboard
from edgeopt.cli.inspect_lines import Lines
from edgeopt.flows import inspect_files
from edgeopt.flows.inspect import Asked
from edgeopt.program.frames import reference
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.camera import Camera
from tests.small_project import run_edgeopt, write_project

CAMERA = {"scale": "2/255", "mean": 0.5, "size": [36, 40], "fit": "crop"}
DATA = '''
def frames(count, seed):
    """The bars as a camera sees them: bytes, three times as large, with stripes beside that a crop leaves out."""
    images, labels = bars(count, seed)
    x = np.clip((images + 0.5) / 2.0 * 255, 0, 255).round().astype(np.uint8)
    x = x.repeat(3, 2).repeat(3, 3).transpose(0, 2, 3, 1)
    return np.pad(x, ((0, 0), (0, 0), (2, 2), (0, 0)), constant_values=255), labels

def calibration():
    yield {"image": frames(16, 1)[0]}

def evaluate(predict):
    images, _ = frames(48, 3)
    answers = [predict({"image": images[i : i + 16]}) for i in range(0, 48, 16)]
    assert all(a["scores.indices"].dtype == np.int32 for a in answers)
    return {"first": float(np.concatenate([a["scores.indices"][:, 0] for a in answers]).mean()) + 1.0}
'''


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("camera")
    project = write_project(
        folder / "project", without=("train", "loss", "qat"), data_code=DATA, limits={"metric_drop": {"first": 0.1}},
        inputs={"image": {"shape": ["n", 1, 12, 12], "camera": CAMERA}}, outputs={"scores": {"head": "topk", "k": 2}},
    )  # fmt: skip
    done = run_edgeopt("build", "--profile", "x86-cpu", "--project", str(project), "--out", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    return project, folder / "out"


def test_the_artifact_takes_frames_and_gives_classes(built):
    _, folder = built
    manifest = Artifact.open(folder).manifest
    assert [(s.name, s.dtype, s.shape) for s in manifest.inputs] == [("image", "uint8", ("n", 36, 40, 1))]
    assert [(s.name, s.dtype) for s in manifest.outputs] == [("scores.values", "float32"), ("scores.indices", "int32")]
    agreed = {c.name: c.tolerance.agreement["scores.indices"] for c in manifest.candidates}
    assert {name: (one.axis, one.least > 0.8) for name, one in agreed.items()} == dict.fromkeys(agreed, (1, True))
    assert {"onnxruntime-fp32", "onnxruntime-int8"} <= set(agreed)
    assert {"usage/README.md", "usage/onnxruntime.cpp"} <= set(manifest.files)
    rows = {row["name"]: row["checks"] for row in json.loads((folder / "build.json").read_text())["candidates"]}
    for checks in rows.values():
        assert {"reference agreement", "metric first"} <= {check["name"] for check in checks}


def test_every_candidate_gives_the_user_s_structure_for_a_frame(built):
    """Against the user's model on the documented arithmetic, within 1e-5 where nothing is rounded."""
    import torch

    from edgeopt.ports.user_code import load_attribute

    project, folder = built
    build = load_attribute("model.py:build", project, key="model", error=AssertionError)
    x = np.random.default_rng(0).integers(0, 256, (3, 36, 40, 1)).astype(np.uint8)
    prepared = reference(x, Camera(**CAMERA), ("n", 1, 12, 12))
    with torch.no_grad():
        scores = build().eval()(torch.from_numpy(prepared.copy()))["scores"].numpy()
    order = np.argsort(-scores, 1, kind="stable")
    for name in ("onnxruntime-fp32", "torchscript-fp32"):
        with onboard.load(folder, candidate=name) as predictor:
            found = predictor.predict({"image": x})["scores"]
        np.testing.assert_allclose(found["values"], np.take_along_axis(scores, order, 1), atol=1e-5)
        np.testing.assert_array_equal(found["indices"], order)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (np.zeros((1, 36, 40, 1), np.float32), "must be uint8, given: float32"),
        (np.zeros((1, 36, 40, 1), np.int8), "must be uint8, given: int8"),
        (np.zeros((1, 1, 36, 40), np.uint8), "axis 1 must be 36"),
        (np.zeros((1, 36, 40, 3), np.uint8), "axis 3 must be 1"),
        (np.zeros((1, 40, 36, 1), np.uint8), "axis 1 must be 36"),
        (np.zeros((36, 40, 1), np.uint8), "the model takes (n, 36, 40, 1)"),
        (np.zeros((17, 36, 40, 1), np.uint8), "n from 1 to 16"),
    ],
)
def test_a_wrong_frame_is_named_before_the_call(built, frame, said):
    with onboard.load(built[1], candidate="onnxruntime-fp32") as predictor, pytest.raises(ValueError) as caught:
        predictor.predict({"image": frame})
    assert said in str(caught.value)
    assert "image" in str(caught.value)


def test_inspect_names_the_files_for_pipelines(built, capsys):
    artifact = Artifact.open(built[1])
    found = inspect_files.inspect_artifact(artifact, Asked())
    Lines(quiet=False, top=1).end(found, None)
    assert f"from C++: {built[1] / 'usage' / 'onnxruntime.cpp'}\n" in capsys.readouterr().out


def test_loading_by_the_package_gives_the_same(built):
    x = np.zeros((1, 36, 40, 1), np.uint8)
    assert set(edgeopt.load(built[1]).predict({"image": x})["scores"]) == {"values", "indices"}
