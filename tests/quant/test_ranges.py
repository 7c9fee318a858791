"""Weights, biases and ranges: what the integers hold, and what is reported of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.quant import convert
from edgeopt.quant.observers import PercentileObserver
from tests.quant import models
from tests.quant.programs import batches, in_onnxruntime, outputs, program, quantization, sqnr_db


def depthwise(scales: torch.Tensor) -> nn.Conv2d:
    model = nn.Conv2d(len(scales), len(scales), 3, padding=1, groups=len(scales), bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn_like(model.weight) * scales.reshape(-1, 1, 1, 1))
    return model


def channel_sqnr_db(p, integer, x) -> list[float]:
    exact, value = outputs(p, x), outputs(integer, x)
    return [sqnr_db(exact[:, c], value[:, c]) for c in range(exact.shape[1])]


def test_one_scale_a_channel_keeps_depthwise_channels_that_one_scale_loses():
    """Q01: 32 channels from 1 to a thousandth. The output keeps a scale of its own, so weights are read directly."""
    p = program(depthwise(torch.logspace(0, -3, 32)), 32, 8, 8)
    weights = {}
    for per_channel in (True, False):
        integer, _ = convert.from_batches(p, quantization(per_channel=per_channel, weight_bits=8), batches(32, 8, 8))
        state = integer.module.state_dict()
        stored = next(v for v in state.values() if v.dtype == torch.int8)
        weights[per_channel] = stored.to(torch.int32).abs().amax((1, 2, 3))
    assert bool((weights[True] >= 127).all())
    assert int((weights[False] == 0).sum()) >= 3  # channels that are gone

    # TensorRT's placement leaves the output float: the error is that of input and weights alone
    integer, _ = convert.from_batches(p, quantization("tensorrt"), batches(32, 8, 8))
    x = batches(32, 8, 8, seed=7)[0]["x"]
    assert min(channel_sqnr_db(p, integer, x)) > 35
    integer, _ = convert.from_batches(p, quantization("tensorrt", per_channel=False), batches(32, 8, 8))
    assert min(channel_sqnr_db(p, integer, x)) < 1


def test_dead_channels_are_reported_and_stay_zero():
    scales = torch.ones(8)
    scales[[2, 5]] = 0
    p = program(depthwise(scales), 8, 6, 6)
    integer, report = convert.from_batches(p, quantization(), batches(8, 6, 6))
    assert any("2 of 8 channels are all zero" in line for line in report.warnings)
    assert not outputs(integer, batches(8, 6, 6)[0]["x"])[:, [2, 5]].any()


@pytest.mark.parametrize(
    "model, sizes",
    [
        (nn.Linear(64, 8), (64,)),
        (nn.Conv2d(16, 8, 3), (16, 5, 5)),
        (nn.Conv2d(8, 8, 3, groups=8), (8, 5, 5)),
        (nn.Conv1d(16, 8, 5), (16, 9)),
    ],
)
def test_seven_bit_weights_cannot_saturate_int16_pairs(model, sizes, tmp_path):
    """Q02 as a kind: AVX2's vpmaddubsw adds two products of uint8 and int8 in int16; without VNNI that is what runs.

    Two products of the largest values must fit: 255 * (64 + 64) = 32640 <= 32767. All inputs and weights are at
    their extremes here, and the sums are checked in the real runtime.
    """
    with torch.no_grad():
        model.weight.copy_(torch.sign(torch.randn_like(model.weight)))
        model.weight[0] = 1
        model.bias.zero_()
    data = [{"x": np.full((4, *sizes), 255, np.float32)}]
    p = program(model, *sizes)
    integer, _ = convert.from_batches(p, quantization(weight_bits=7), data)
    stored = [v for v in integer.module.state_dict().values() if v.dtype == torch.int8]
    assert [(int(v.min()), int(v.max())) for v in stored] == [(-64, 63)]
    assert 255 * 2 * max(int(v.to(torch.int32).abs().max()) for v in stored) <= 32767
    session, _ = in_onnxruntime(integer, tmp_path)
    exact, got = outputs(p, data[0]["x"]), session.run(None, data[0])[0]
    assert np.abs(exact - got).max() <= 0.02 * np.abs(exact).max()  # saturated: half of it


def test_the_sum_that_saturates_elsewhere_is_right(tmp_path):
    """Q02: 255 four times by 127 four times is 129540, and 66000 where pairs saturate."""
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(127.0)
        model.bias.zero_()
    x = np.full((1, 4), 255, np.float32)
    integer, _ = convert.from_batches(program(model, 4), quantization(), [{"x": x}])
    session, kernels = in_onnxruntime(integer, tmp_path)
    assert kernels["QGemm"] == 1
    assert session.run(None, {"x": x})[0].item() == pytest.approx(129540, rel=0.01)


@pytest.mark.parametrize("bias", [5.0, -5e4])
@pytest.mark.parametrize("scale", [0.0, 1e-7])
def test_a_bias_beside_vanishing_weights_is_kept(bias, scale, tmp_path):
    """An int32 bias at input scale times weight scale overflows where the weights of a channel nearly vanish."""
    model = nn.Conv2d(3, 2, 1)
    with torch.no_grad():
        model.weight[1] = scale
        model.bias.copy_(torch.tensor([0.0, bias]))
    p = program(model, 3, 4, 4)
    integer, _ = convert.from_batches(p, quantization(), batches(3, 4, 4, scale=1e-3))
    session, _ = in_onnxruntime(integer, tmp_path)
    got = session.run(None, batches(3, 4, 4)[0])[0]
    assert got[:, 1] == pytest.approx(bias, rel=0.01)


def test_a_percentile_leaves_out_a_far_outlier():
    """Q04: 1e5 normals and one 1000; the whole range has a scale of 3.9, the percentile about .035."""
    values = torch.randn(100_000)
    observer = PercentileObserver(dtype=torch.uint8, qscheme=torch.per_tensor_affine, quant_min=0, quant_max=255)
    for part in values.split(25_000):
        observer(part)
    observer(torch.tensor([1000.0]))
    assert float(observer.calculate_qparams()[0]) == pytest.approx(0.035, rel=0.2)


def test_outliers_and_off_centre_ranges_are_reported_for_their_layer():
    """Q04 and Q05: warned, with the layer's name."""
    data = batches(3, 32, 32, count=2)
    data[1]["x"][0, 0, 0, 0] = 1000
    _, report = convert.from_batches(program(models.Gated(nn.ReLU()), 3, 32, 32), quantization(), data)
    assert any(line.startswith("x: outliers") for line in report.warnings)

    off_centre = [{"x": b["x"].clip(-1, 1) / 2 + 1000.5} for b in batches(3, 8, 8)]
    _, report = convert.from_batches(program(nn.Conv2d(3, 2, 1), 3, 8, 8), quantization(), off_centre)
    assert any(line.startswith("x: kept float: values lie in 1000 to 1001, far from 0") for line in report.warnings)


def test_healthy_layers_are_not_warned_about():
    _, report = convert.from_batches(program(models.Net(), 3, 16, 16), quantization(), batches(3, 16, 16))
    assert report.warnings == ()


@pytest.mark.parametrize("ranges", ["minmax", "moving-average", "percentile", "mse", "entropy"])
def test_calibration_gives_the_same_program_twice(ranges):
    p = program(models.Net(), 3, 16, 16)
    states = []
    for _ in range(2):
        integer, _ = convert.from_batches(p, quantization(ranges=ranges), batches(3, 16, 16))
        scales = [n.args[1] for n in integer.module.graph.nodes if "quantize_per_tensor" in str(n.target)]
        states.append((scales, integer.module.state_dict()))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(v, states[1][1][k]) for k, v in states[0][1].items())


def test_bias_correction_takes_the_shift_of_rounded_weights_out():
    """Weights that all round the same way shift each output's mean; a bias can hold that shift."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    with torch.no_grad():
        model[2].weight.copy_(torch.full_like(model[2].weight, 0.4))
        model[2].weight[:, 0, 0, 0] = 63.5  # the scale is 1, so that 0.4 rounds to 0
        model[2].bias.zero_()
    p = program(model, 4, 12, 12)
    x = batches(4, 12, 12, seed=11, size=32)[0]["x"]
    shift = {}
    for samples in (4, 32):  # of fewer than 8 nothing is corrected
        data = batches(4, 12, 12, count=1, size=samples)
        integer, report = convert.from_batches(p, quantization("tensorrt", weight_bits=7), data)
        assert report.biases_corrected == (2 if samples == 32 else 0)
        shift[samples] = np.abs((outputs(p, x) - outputs(integer, x)).mean((0, 2, 3))).max()
    assert shift[32] < shift[4] / 5
