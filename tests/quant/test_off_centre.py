"""Q05 as a kind: values of which eight bits would keep nothing; warned, and the layers around stay float.

Far from 0, infinite as in a mask, or NaN inside the model on data that is itself good.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.quant import convert
from tests.quant import models
from tests.quant.programs import batches, in_onnxruntime, names, outputs, program, quantization, sqnr_db

RANGES = ("minmax", "moving-average", "percentile", "mse", "entropy")


def off_centre(low: float = 1000, width: float = 1) -> list[dict]:
    return [{"x": b["x"].clip(-1, 1) * np.float32(width / 2) + np.float32(low + width / 2)} for b in batches(3, 8, 8)]


def around_mean_db(p, integer, x) -> float:
    """SQNR of what an output says beside its mean."""
    exact, value = outputs(p, x).astype(np.float64), outputs(integer, x).astype(np.float64)
    return sqnr_db(exact - exact.mean(), value - exact.mean() + 1e-9)  # float outputs may be equal


def centred(first: nn.Conv2d, *rest: nn.Module) -> nn.Sequential:
    """A chain whose first layer takes the offset away: its weights add up to 0 in each output channel."""
    with torch.no_grad():
        first.weight.sub_(first.weight.mean((1, 2, 3), keepdim=True))
    return nn.Sequential(first, *rest)


class Added(nn.Module):
    """An off-centre operand of an addition, and an integer layer behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.last(self.first(x - 1000) + x - 1000)


CHAINS = {
    "convolution": lambda: nn.Conv2d(3, 2, 1),
    "behind a layer": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 2, 1)),
    "with an activation": lambda: centred(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)),
    "two readers": models.Branches,
    "an addition": Added,
}


@pytest.mark.parametrize("placement", ["onnxruntime-x86", "tensorrt"])
@pytest.mark.parametrize("model", CHAINS.values(), ids=CHAINS)
def test_layers_on_values_far_from_0_stay_float(model, placement):
    p = program(model(), 3, 8, 8)
    data = off_centre()
    integer, report = convert.from_batches(p, quantization(placement), data)
    assert any("values lie in 1000 to 1001, far from 0" in line for line in report.warnings)
    assert around_mean_db(p, integer, data[0]["x"]) > 25  # quantized, it is below 0


@pytest.mark.parametrize("ranges", RANGES)
def test_no_calibrator_makes_integers_of_them(ranges, tmp_path):
    p = program(CHAINS["with an activation"](), 3, 8, 8)
    data = off_centre()
    integer, report = convert.from_batches(p, quantization(ranges=ranges), data)
    assert list(report.left_float) == ["model.0"] and "far from 0" in report.left_float["model.0"]
    assert 0 < report.coverage < 1
    assert "x: kept float" in "\n".join(report.warnings)
    session, kernels = in_onnxruntime(integer, tmp_path)
    assert kernels["QLinearConv"] == 1  # the second convolution runs on integers all the same
    assert np.allclose(outputs(integer, data[1]["x"]), session.run(None, data[1])[0], rtol=0.02)


def test_a_layer_that_makes_them_stays_float_with_the_one_that_reads_them():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 2, 1))
    with torch.no_grad():
        model[0].bias.fill_(5000)
        model[1].bias.sub_(model[1].weight.sum((1, 2, 3)) * 5000)
    p = program(model, 3, 8, 8)
    integer, report = convert.from_batches(p, quantization(), batches(3, 8, 8))
    assert list(report.left_float) == ["model.0", "model.1"]
    assert "model.0: kept float: values lie in " in report.warnings[0]
    assert around_mean_db(p, integer, batches(3, 8, 8, seed=4)[0]["x"]) > 30


@pytest.mark.parametrize("low, width, kept", [(1000, 1, True), (-1001, 1, True), (20, 1, True), (10, 1, False)])
def test_where_the_border_is(low, width, kept):
    """Fewer than 16 of 255 steps stay float, fewer than 32 are warned about; values of 20 to 21 use 12."""
    _, report = convert.from_batches(program(nn.Conv2d(3, 2, 1), 3, 8, 8), quantization(), off_centre(low, width))
    lines = [line for line in report.warnings if line.startswith("x: ")]
    assert len(lines) == 1 and ("kept float" in lines[0]) == kept


def test_values_around_0_or_beside_it_are_left_alone():
    for low, width in ((-1, 2), (0, 1), (0.5, 1)):
        p = program(nn.Conv2d(3, 2, 1), 3, 8, 8)
        integer, report = convert.from_batches(p, quantization("tensorrt"), off_centre(low, width))
        assert report.warnings == () and "quantize_per_tensor" in names(integer)


class Masked(nn.Module):
    """Scores with -inf where a key is masked, as attention written by hand has them."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf))

    def forward(self, x):
        scores = torch.matmul(self.query(x), x.transpose(1, 2)) + self.mask
        return self.out(torch.matmul(scores.softmax(-1), x))


class Logarithm(nn.Module):
    """NaN for negative values, before a layer; the answer does not depend on it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x).log()).nan_to_num(0.0) + self.second(x)


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("model", [Masked, Logarithm], ids=["mask", "NaN"])
def test_infinities_and_nan_inside_the_model_stay_float(model, ranges):
    p = program(model(), 6, 8)
    integer, report = convert.from_batches(p, quantization(ranges=ranges), batches(6, 8))
    x = batches(6, 8, seed=5)[0]["x"]
    exact, found = outputs(p, x), outputs(integer, x)
    assert np.isfinite(found).all()
    kept = np.isfinite(exact)
    assert sqnr_db(exact[kept], found[kept]) > 15
    if model is Logarithm:
        assert any("kept float: values are infinite or NaN on the calibration data" in w for w in report.warnings)
