"""A camera's frames become the model's input by the documented arithmetic, in numpy and in the graph alike."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from edgeopt.program.frames import Frames, placement, reference
from edgeopt.spec.camera import Camera
from tests.conftest import absent

IMAGENET = {"scale": "1/255", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
RESIZED = [  # frame, model, fit
    ((48, 64), (24, 24), "stretch"),
    ((17, 31), (24, 20), "stretch"),  # one axis grows
    ((1, 1), (3, 5), "stretch"),
    ((24, 20), (24, 20), "stretch"),
    ((72, 60), (24, 20), "stretch"),
    ((48, 64), (24, 24), "crop"),
    ((64, 33), (24, 24), "crop"),
    ((48, 64), (24, 24), "letterbox"),
    ((63, 20), (24, 25), "letterbox"),
]


def frames(camera: Camera, size: tuple[int, int], channels: int = 3, count: int = 2) -> np.ndarray:
    rng = np.random.default_rng(sum(size))
    x = rng.integers(0, 256, (count, *size, channels)).astype(camera.dtype)
    x[0, 0, 0], x[0, -1, -1] = 0, 255
    return x if camera.layout == "HWC" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def by_graph(camera: Camera, shape: tuple, x: np.ndarray) -> np.ndarray:
    return Frames(camera, shape)(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_normalisation_is_that_of_torchvision(layout, color):
    camera = Camera(layout=layout, color=color, **IMAGENET)
    x = frames(camera, (5, 7))
    rgb = x.transpose(0, 3, 1, 2) if layout == "HWC" else x
    rgb = rgb[:, ::-1] if color == "BGR" else rgb
    mean, std = (np.array(IMAGENET[key]).reshape(1, 3, 1, 1) for key in ("mean", "std"))
    wanted = ((rgb / 255 - mean) / std).astype(np.float32)
    found = reference(x, camera, ("n", 3, 5, 7))
    np.testing.assert_array_equal(found, wanted)
    assert found.flags["C_CONTIGUOUS"]
    np.testing.assert_allclose(by_graph(camera, ("n", 3, 5, 7), x), wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize(("size", "model", "fit"), RESIZED)
def test_a_resized_frame_in_the_graph_is_the_reference_s(size, model, fit, mode, layout, dtype):
    camera = Camera(dtype=dtype, layout=layout, color="BGR", size=size, resize=mode, fit=fit, **IMAGENET)
    x, shape = frames(camera, size), ("n", 3, *model)
    wanted = reference(x, camera, shape)
    assert wanted.shape == (2, 3, *model)
    np.testing.assert_allclose(by_graph(camera, shape, x), wanted, atol=2e-6 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("size", [(9, 40), (24, 20), (50, 21)])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_a_frame_of_any_size_is_resized_as_one_of_that_size(size, mode):
    named = Camera(size=("h", "w"), resize=mode, **IMAGENET)
    fixed = Camera(size=size, resize=mode, **IMAGENET)
    x, shape = frames(named, size), ("n", 3, 24, 20)
    np.testing.assert_array_equal(reference(x, named, shape), reference(x, fixed, shape))
    np.testing.assert_allclose(by_graph(named, shape, x), reference(x, fixed, shape), atol=4e-6)


@pytest.mark.parametrize(("size", "model", "fit"), [row for row in RESIZED if row[2] == "stretch"])
def test_bilinear_is_torch_s(size, model, fit):
    """torch finds places in float32; in float64 it has the same formula."""
    camera = Camera(size=size)
    x = frames(camera, size)
    planes = torch.from_numpy(x.transpose(0, 3, 1, 2).astype(np.float64))
    wanted = torch.nn.functional.interpolate(planes, model, mode="bilinear", align_corners=False).numpy()
    np.testing.assert_allclose(reference(x, camera, ("n", 3, *model)), wanted, atol=1e-3)


def test_nearest_is_torch_s_nearest_exact():
    camera = Camera(size=(17, 31), resize="nearest")
    x = frames(camera, (17, 31))
    planes = torch.from_numpy(x.transpose(0, 3, 1, 2).astype(np.float64))
    wanted = torch.nn.functional.interpolate(planes, (24, 20), mode="nearest-exact").numpy()
    np.testing.assert_array_equal(reference(x, camera, ("n", 3, 24, 20)), wanted)


def library(module: str, package: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        return absent(f"{package} of the dev extra is not installed")


def test_bilinear_is_opencv_s():
    cv2 = library("cv2", "opencv-python-headless")
    camera = Camera(size=(48, 64))
    x = frames(camera, (48, 64), count=1)
    wanted = cv2.resize(x[0].astype(np.float32), (20, 24), interpolation=cv2.INTER_LINEAR).transpose(2, 0, 1)
    np.testing.assert_allclose(reference(x, camera, ("n", 3, 24, 20))[0], wanted, atol=1e-2)


def test_enlarging_is_pillow_s():
    """Pillow widens its window when it shrinks a picture, which is antialiasing; enlarging, it has our formula."""
    image = library("PIL.Image", "pillow")
    camera = Camera(layout="CHW", size=(17, 31))
    x = frames(camera, (17, 31), channels=1, count=1)
    wanted = image.fromarray(x[0, 0].astype(np.float32), mode="F").resize((62, 51), image.BILINEAR)
    np.testing.assert_allclose(reference(x, camera, ("n", 1, 51, 62))[0, 0], np.asarray(wanted), atol=1e-2)


def test_a_letterbox_is_filled_and_centred():
    camera = Camera(size=(10, 20), fit="letterbox", fill=9)
    x = np.full((1, 10, 20, 3), 200, np.uint8)
    found = reference(x, camera, ("n", 3, 21, 20))
    assert placement((10, 20), (21, 20), "letterbox").border == (5, 6, 0, 0)
    assert (found[:, :, 5:15] == 200).all()
    assert (found[:, :, :5] == 9).all()
    assert (found[:, :, 15:] == 9).all()


def test_a_crop_is_the_middle():
    camera = Camera(size=(4, 9), fit="crop")
    x = np.zeros((1, 4, 9, 3), np.uint8)
    x[:, :, 2:6] = 77
    assert placement((4, 9), (8, 8), "crop").window == (0, 2, 4, 4)
    assert (reference(x, camera, ("n", 3, 8, 8)) == 77).all()


def test_the_whole_frame_counts_however_narrow_the_model_s_picture():
    place = placement((1000, 3), (8, 64), "letterbox")
    assert (place.inner, sum(place.border[2:])) == ((8, 1), 63)
    assert placement((3, 1000), (64, 8), "crop").window[2:] == (3, 1)


@pytest.mark.parametrize("value", [0, 255])
def test_extremes(value):
    camera = Camera(color="BGR", size=(9, 9), **IMAGENET)
    x = np.full((1, 9, 9, 3), value, np.uint8)
    wanted = ((value / 255 - np.array(IMAGENET["mean"])) / IMAGENET["std"]).astype(np.float32)
    found = by_graph(camera, ("n", 3, 4, 4), x)
    np.testing.assert_allclose(found, np.broadcast_to(wanted.reshape(1, 3, 1, 1), found.shape), atol=1e-6)
