"""A camera's bytes are the integers that onnxruntime's first convolution reads, with nothing between."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt import passes
from edgeopt.program import ExportedGraph, graph, stored
from edgeopt.program.frames import Frames
from edgeopt.quant import convert
from edgeopt.quant import frames as frames_to_integers
from edgeopt.quant.prepare import complete_metadata, prepare
from edgeopt.spec.camera import Camera
from edgeopt.spec.profile import load_profile
from tests.quant.programs import in_onnxruntime, outputs, program, quantization, sqnr_db

IMAGENET = {"scale": "1/255", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "color": "BGR"}
EVEN = {"mean": 127, "std": 128}


class Net(nn.Module):
    """Frames through a convolution of some kind, a second one, and the mean of all places."""

    def __init__(self, camera: dict, channels: int = 3, **kind):
        super().__init__()
        torch.manual_seed(3)
        self.frames = Frames(Camera(**camera), ("n", channels, 12, 10))
        self.first = nn.Conv2d(channels, kind.pop("out", 6), kind.pop("kernel", 3), **kind)
        self.last = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(self.frames(x)))).mean((2, 3))


def frames(count: int, layout: str = "HWC", channels: int = 3, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    smooth = rng.integers(0, 256, (count, 3, 3, channels)).repeat(4, 1).repeat(4, 2)[:, :12, :10]
    noisy = np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    noisy[0, 0, 0], noisy[0, 0, 1] = 0, 255
    return np.ascontiguousarray(noisy if layout == "HWC" else noisy.transpose(0, 3, 1, 2))


def quantized(net: nn.Module, sizes: tuple[int, ...], layout: str = "HWC", channels: int = 3):
    """(the optimized float program, the integer one)."""
    p = program(net, *sizes, dtype="uint8", values=(0.0, 255.0))
    p, _ = passes.optimize(p, load_profile("x86-cpu"), {}, passes.Run(verified=False))
    return p, calibrated(p, frames(32, layout, channels))


def calibrated(p: ExportedGraph, x: np.ndarray) -> ExportedGraph:
    """The integer program, without the searches for better weights."""
    prepared = prepare(p, quantization())
    prepared.module(torch.from_numpy(x))
    return convert.convert(prepared)[0]


@pytest.mark.parametrize(
    ("camera", "kind"),
    [
        (IMAGENET, {}),
        (IMAGENET, {"padding": (2, 1), "stride": 2, "bias": False}),
        (EVEN, {"padding": 1, "stride": 2}),
    ],
)
def test_no_quantization_stands_before_the_first_convolution(camera, kind, tmp_path):
    p, integer = quantized(Net(camera, **kind), (12, 10, 3))
    session, counts = in_onnxruntime(integer, tmp_path)
    assert counts["QLinearConv"] == 2
    assert not {"Conv", "Cast", "QuantizeLinear", "Sub"} & set(counts)
    x = frames(6, seed=9)
    given = session.run(None, {"x": x})[0]
    assert sqnr_db(outputs(p, x), given) > 20  # 7 bits of weights, 8 of what is between
    np.testing.assert_allclose(given, outputs(integer, x), atol=0.02 * np.abs(given).max())


class First(Net):
    def forward(self, x):
        return self.first(self.frames(x))


def read_as_bytes(net: nn.Module) -> tuple[np.ndarray, np.ndarray, nn.Module]:
    """The optimized program's answer, that of the same graph reading bytes, and the latter; nothing else is rounded."""
    p = program(net, 12, 10, 3, dtype="uint8", values=(0.0, 255.0))
    p, _ = passes.optimize(p, load_profile("x86-cpu"), {}, passes.Run(verified=False))
    module = graph.copied(p.module)
    complete_metadata(module, p)
    assert frames_to_integers.as_integers(module) == 1
    x = frames(6, seed=9)
    return outputs(p, x), outputs(dataclasses.replace(p, module=module), x), module


@pytest.mark.parametrize(
    ("camera", "kind"),
    [
        (EVEN, {"padding": 1}),
        (EVEN, {"padding": (0, 2), "stride": 3}),
        ({"scale": "1/255"}, {"padding": 1}),
        (IMAGENET, {}),
        (IMAGENET, {"bias": False, "stride": 2}),
    ],
)
def test_reading_bytes_changes_nothing(camera, kind):
    wanted, found, _ = read_as_bytes(First(camera, **kind))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", [{"padding": 1}, {"padding": (2, 1), "stride": 2}, {"padding": 1, "groups": 3}])
def test_means_of_their_own_are_rounded_beside_the_picture_only(kind):
    net = First({**IMAGENET, "color": None}, **kind)
    wanted, found, module = read_as_bytes(net)
    high, wide = (net.first.padding[i] for i in (0, 1))
    rows, columns = -(-high // net.first.stride[0]), -(-wide // net.first.stride[1])
    inside = (..., slice(rows, -rows), slice(columns, -columns))
    np.testing.assert_allclose(found[inside], wanted[inside], atol=1e-5 * np.abs(wanted).max())
    convolution = next(node for node in module.graph.nodes if "conv2d" in str(node.target))
    weight = stored.tensor(module, convolution.args[1])
    most = 0.5 * weight.abs().sum((1, 2, 3)).numpy()[:, None, None]  # half a byte at every place
    assert (np.abs(found - wanted) <= most + 1e-5).all()
    assert np.abs(found - wanted).max() > 1e-4


def test_one_channel_and_planes(tmp_path):
    net = Net({"layout": "CHW", "mean": 128, "std": 64}, channels=1, padding=1)
    _, integer = quantized(net, (1, 12, 10), "CHW", 1)
    _, counts = in_onnxruntime(integer, tmp_path)
    assert (counts["QLinearConv"], counts["QuantizeLinear"]) == (2, 0)


def test_weights_are_improved_with_bytes_before_them():
    p, plain = quantized(Net({**IMAGENET, "color": None}, padding=1), (12, 10, 3))
    data = [{"x": frames(8, seed=seed)} for seed in range(2)]
    better, report = convert.from_batches(p, quantization(), data)
    assert report.improved
    x = frames(6, seed=9)
    assert sqnr_db(outputs(p, x), outputs(better, x)) > sqnr_db(outputs(p, x), outputs(plain, x)) - 1


def test_what_else_reads_the_picture_keeps_it_float(tmp_path):
    class Both(Net):
        def forward(self, x):
            picture = self.frames(x)
            return torch.cat([self.last(torch.relu(self.first(picture))).mean((2, 3)), picture.mean((2, 3))], 1)

    p, integer = quantized(Both(EVEN, padding=1), (12, 10, 3))
    session, _ = in_onnxruntime(integer, tmp_path)
    x = frames(6, seed=9)
    assert sqnr_db(outputs(p, x), session.run(None, {"x": x})[0]) > 30


def test_a_resized_frame_is_quantized_as_any_float(tmp_path):
    net = Net({**IMAGENET, "size": [20, 30]}, padding=1)
    p = program(net, 20, 30, 3, dtype="uint8", values=(0.0, 255.0))
    p, _ = passes.optimize(p, load_profile("x86-cpu"), {}, passes.Run(verified=False))
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (8, 20, 30, 3)).astype(np.uint8)
    integer = calibrated(p, x)
    session, counts = in_onnxruntime(integer, tmp_path)
    assert counts["QLinearConv"] == 2
    assert sqnr_db(outputs(p, x), session.run(None, {"x": x})[0]) > 25
