"""`camera:` and `outputs:` of a project: what is read, and what is refused with the key and what to write."""

from __future__ import annotations

import json

import pytest

from edgeopt.errors import ProjectError
from edgeopt.spec.camera import Camera
from edgeopt.spec.project import load_project


def project(folder, camera=None, *, shape=("n", 3, 24, 20), axes=(), **changes):
    (folder / "model.py").touch()
    (folder / "m.onnx").touch()
    given = {"shape": list(shape), **({"camera": camera} if camera is not None else {})}
    values = {
        "name": "x", "model": "model.py:build", "inputs": {"image": {**given, **changes.pop("input", {})}},
        "axes": {name: {"min": 1, "opt": 8, "max": 640} for name in ("n", *axes)}, **changes,
    }  # fmt: skip
    (folder / "edgeopt.yaml").write_text(json.dumps(values))
    return load_project(folder)


def test_a_fraction_is_read_as_one(tmp_path):
    camera = project(tmp_path, {"scale": "1/255", "mean": 0.5}).inputs["image"].camera
    assert (camera.scale, camera.mean, camera.std) == (1 / 255, (0.5,), (1.0,))


@pytest.mark.parametrize(
    ("camera", "axes", "shape"),
    [
        ({}, (), ("n", 24, 20, 3)),
        ({"layout": "CHW"}, (), ("n", 3, 24, 20)),
        ({"size": [480, 640]}, (), ("n", 480, 640, 3)),
        ({"size": ["h", 640], "layout": "CHW"}, ("h",), ("n", 3, "h", 640)),
    ],
)
def test_the_artifact_takes_frames(camera, axes, shape, tmp_path):
    given = project(tmp_path, camera, axes=axes).inputs["image"]
    assert (given.given_shape, given.given_dtype) == (shape, "uint8")
    assert (given.shape, given.dtype) == (("n", 3, 24, 20), "float32")


@pytest.mark.parametrize(
    ("camera", "changes", "key", "said"),
    [
        ({"mean": [1, 2]}, {}, "camera.mean", "2 numbers for 3 channels"),
        ({"std": [1, 0, 1]}, {}, "camera", "cannot be 0"),
        ({"scale": 0}, {}, "camera", "every frame the same"),
        ({"scale": "1/0"}, {}, "camera.scale", "divides by 0"),
        ({"scale": "a/b"}, {}, "camera.scale", "number"),
        ({"layout": "HCW"}, {}, "camera.layout", "HWC"),
        ({"color": "RGB"}, {"shape": ("n", 1, 24, 20)}, "camera.color", "3 channels"),
        ({"fit": "crop"}, {}, "camera.fit", "not resized"),
        ({"size": ["h", "w"], "fit": "crop"}, {"axes": ("h", "w")}, "camera.fit", "as numbers"),
        ({"size": [9, 9]}, {"shape": ("n", 3, "h", "w"), "axes": ("h", "w")}, "camera.size", "fixed size"),
        ({"size": ["h", 9]}, {}, "inputs.image", "'h' is not declared"),
        ({}, {"shape": (3, 24, 20)}, "camera.layout", "[batch, channels, height, width]"),
        ({}, {"shape": ("n", "c", 24, 20), "axes": ("c",)}, "camera.layout", "fixed number of channels"),
        ({}, {"input": {"dtype": "uint8"}}, "camera.dtype", "float32"),
        ({}, {"input": {"values": [-1, 1]}}, "inputs.image.values", "0 to 255"),
        ({}, {"model": "m.onnx"}, "inputs.image.camera", "ONNX"),
        ({"sise": [1, 1]}, {}, "camera.sise", "did you mean 'size'"),
        (None, {"outputs": {"y": {"head": "argmx"}}}, "outputs.y.head", "argmax"),
        (None, {"outputs": {"y": {"head": "topk"}}}, "outputs.y", "topk needs k"),
        (None, {"outputs": {"y": {"head": "softmax", "k": 3}}}, "outputs.y", "k belongs to"),
        (None, {"outputs": {"y": {"head": "softmax"}}, "model": "m.onnx"}, "outputs", "ONNX"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(camera, changes, key, said, tmp_path):
    with pytest.raises(ProjectError) as caught:
        project(tmp_path, camera, **changes)
    message = f"{caught.value.what} {caught.value.todo}"
    assert key in message
    assert said in message


def test_colours_turn_only_where_they_differ():
    assert Camera(color="BGR").swaps
    assert not Camera(color="BGR", model_color="BGR").swaps
    assert not Camera(model_color="BGR").swaps
