"""What stands between a frame and the first layer: folded where that is exact, else in its cheapest place."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt import passes
from edgeopt.program import Call, graph
from edgeopt.program.frames import Frames, reference
from edgeopt.spec.camera import Camera
from edgeopt.spec.profile import load_profile
from tests.passes.support import optimized, program, targets

IMAGENET = {"scale": "1/255", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "color": "BGR"}
GRAY = {"scale": "1/255", "mean": 0.5, "std": 0.25}
EVEN = {"mean": 127, "std": 128, "color": "BGR"}


class Net(nn.Module):
    def __init__(self, camera: Camera, shape: tuple, *layers: nn.Module):
        super().__init__()
        self.frames, self.camera, self.shape = Frames(camera, shape), camera, shape
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(self.frames(x))


def conv(channels: int = 3, **kind) -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(channels, 6, kind.pop("kernel", 3), **kind)


def of(net: Net):
    shape = net.camera.frame_shape(net.shape)
    given = program(net, ("N", *shape[1:]), dtype="uint8")
    signature = dataclasses.replace(given.signature, values={"x0": (0.0, 255.0)})
    x = graph.synthetic(signature, graph.sizes(signature, "opt"), 1)
    return dataclasses.replace(given, signature=signature, reference=(Call(x, graph.run(given, x)),))


def check(net: Net, result) -> None:
    """The folded graph against the layers on the float64 reference, on noise and on the extremes."""
    rng = np.random.default_rng(0)
    size = (2, *net.camera.frame_shape(net.shape)[1:])
    for x in (rng.integers(0, 256, size).astype(np.uint8), np.zeros(size, np.uint8), np.full(size, 255, np.uint8)):
        with torch.no_grad():
            wanted = net.layers(torch.from_numpy(reference(x, net.camera, net.shape).copy())).numpy()
        found = graph.run(result, {"x0": x})["y0"]
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


FOLDED = [  # camera, channels, layers, operators that stay before the first layer
    (IMAGENET, 3, lambda: [conv()], []),
    (IMAGENET, 3, lambda: [conv(stride=2, bias=False)], []),
    (IMAGENET, 3, lambda: [conv(padding=1)], ["sub"]),
    (IMAGENET, 3, lambda: [conv(padding=(0, 1), stride=2, dilation=2)], ["sub"]),
    (IMAGENET, 3, lambda: [conv(padding="same")], ["sub"]),
    (IMAGENET, 3, lambda: [nn.ZeroPad2d((0, 1, 0, 1)), conv(stride=2)], ["sub", "pad"]),
    (IMAGENET, 3, lambda: [nn.ReflectionPad2d(1), conv()], ["pad"]),
    (IMAGENET, 3, lambda: [conv(groups=3)], ["flip"]),
    (EVEN, 3, lambda: [conv(padding=1), nn.ReLU()], ["sub"]),
    ({"scale": "1/255", "color": "BGR"}, 3, lambda: [conv(padding=1)], []),
    (GRAY, 1, lambda: [conv(1)], []),
    (GRAY, 1, lambda: [conv(1, padding=2)], ["sub"]),
    (IMAGENET, 3, lambda: [nn.ConvTranspose2d(3, 4, 3, bias=False)], ["sub"]),
    (IMAGENET, 3, lambda: [nn.ReLU(), conv()], ["flip", "sub", "mul", "relu"]),
    (IMAGENET, 3, lambda: [nn.Flatten(), nn.Linear(3 * 48, 2)], ["flip"]),
]


@pytest.mark.parametrize(("camera", "channels", "layers", "left"), FOLDED)
def test_what_is_left_before_the_first_layer(camera, channels, layers, left):
    net = Net(Camera(**camera), ("N", channels, 6, 8), *layers()).eval()
    result, records = optimized(of(net))
    assert not any(record.status == "dropped" for record in records.values())
    check(net, result)
    names = [name.split(".")[1].removeprefix("constant_").removesuffix("_nd") for name in targets(result)]
    until = next((i for i, name in enumerate(names) if name.startswith(("conv", "linear", "flatten"))), len(names))
    moves = {"permute", "to", "transpose"}
    assert [name for name in names[:until] if name not in moves] == left


def test_frames_are_moved_as_bytes_but_for_tensorrt():
    net = Net(Camera(**IMAGENET, size=(9, 11)), ("N", 3, 6, 8), conv(padding=1)).eval()
    given = of(net)
    here, _ = passes.optimize(given, load_profile("x86-cpu"), {})
    jetson, records = passes.optimize(given, load_profile("orin-nano"), {})
    check(net, here)
    check(net, jetson)
    assert targets(here)[0] == "aten.index_select.default"
    assert [name for name in targets(jetson) if name == "aten.to.dtype"] == targets(jetson)[:1]
    assert {record.name: record.status for record in records}["cast_first"] == "applied"


def test_a_picture_that_others_read_keeps_its_colours():
    class Both(Net):
        def forward(self, x):
            picture = self.frames(x)
            return self.layers(picture).mean((2, 3)), picture.mean((2, 3))

    net = Both(Camera(**IMAGENET), ("N", 3, 6, 8), conv()).eval()
    given = of(net)
    result, records = optimized(given)
    assert "aten.flip.default" in targets(result)
    assert records["channel_order"].declined
    x = np.random.default_rng(0).integers(0, 256, (2, 6, 8, 3)).astype(np.uint8)
    for name, wanted in graph.run(given, {"x0": x}).items():
        np.testing.assert_allclose(graph.run(result, {"x0": x})[name], wanted, atol=1e-5)
