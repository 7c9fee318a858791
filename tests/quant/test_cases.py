"""Cases that went wrong elsewhere, each as its whole kind: every operator, dimension and form that could meet it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from edgeopt.quant import convert
from tests.quant.programs import batches, in_onnxruntime, kernels_of, outputs, program, quantization, sqnr_db

PLACEMENTS = ("onnxruntime-x86", "onnxruntime-arm", "tensorrt")


def quantized(model: nn.Module, *sizes: int, placement: str = "onnxruntime-x86", data=None, **settings):
    p = program(model, *sizes)
    integer, report = convert.from_batches(p, quantization(placement, **settings), data or batches(*sizes))
    return p, integer, report


def pairs(p) -> dict[str, tuple]:
    return {
        n.args[0].name: (n.args[1], n.args[2])
        for n in p.module.graph.nodes
        if n.target is torch.ops.quantized_decomposed.quantize_per_tensor.default
    }


# Q01: weights of very different range, one scale for all of them

WEIGHTED = {
    "depthwise 1d": (lambda: nn.Conv1d(32, 32, 3, padding=1, groups=32), (32, 12)),
    "depthwise 2d": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), (32, 8, 8)),
    "depthwise 3d": (lambda: nn.Conv3d(32, 32, 3, padding=1, groups=32), (32, 4, 4, 4)),
    "grouped": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=4), (32, 8, 8)),
    "pointwise": (lambda: nn.Conv2d(8, 32, 1), (8, 8, 8)),
    "linear": (lambda: nn.Linear(8, 32), (8,)),
    "linear of tokens": (lambda: nn.Linear(8, 32), (5, 8)),
}


@pytest.mark.parametrize("make, sizes", WEIGHTED.values(), ids=WEIGHTED.keys())
def test_channels_a_thousand_times_smaller_keep_their_accuracy(make, sizes):
    """Q01: 32 channels x logspace(0, -3); with one scale for all, the worst are gone."""
    model = make()
    with torch.no_grad():
        model.weight.mul_(torch.logspace(0, -3, 32).reshape(-1, *[1] * (model.weight.ndim - 1)))
        model.bias.zero_()
    x = batches(*sizes, seed=7)[0]["x"]
    worst = {}
    for per_channel in (True, False):  # the output is left float here, so that the error is that of the weights
        p, integer, _ = quantized(model, *sizes, placement="tensorrt", per_channel=per_channel)
        exact, got = outputs(p, x), outputs(integer, x)
        axis = -1 if isinstance(model, nn.Linear) else 1
        channels = zip(np.moveaxis(exact, axis, 0), np.moveaxis(got, axis, 0), strict=True)
        worst[per_channel] = min(sqnr_db(a, b) for a, b in channels)
    assert worst[True] > 30 and worst[False] < 10
    assert quantization().per_channel


# Q03: smooth activations, as operators and written out

SMOOTH = {
    "silu": functional.silu, "gelu": functional.gelu, "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "hardswish": functional.hardswish, "mish": functional.mish, "elu": functional.elu, "softplus": functional.softplus,
    "tanh": torch.tanh, "hardsigmoid": functional.hardsigmoid,
    "silu by hand": lambda x: x * torch.sigmoid(x), "silu by hand, turned": lambda x: torch.sigmoid(x) * x,
    "hardswish by hand": lambda x: x * functional.hardsigmoid(x), "tanh gate": lambda x: x * torch.tanh(x),
}  # fmt: skip


class Bent(nn.Module):
    """The activation between two convolutions that change nothing."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.first, self.second = nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)

    def forward(self, x):
        return self.second(self.activation(self.first(x)))


@pytest.mark.parametrize("activation", SMOOTH.values(), ids=SMOOTH.keys())
def test_a_smooth_activation_costs_a_step_of_what_it_reads_and_one_of_what_it_gives(activation):
    """Q03: x, gate and product quantized one by one leave SiLU 7 values below 0, three steps off."""
    x = np.linspace(-12, 12, 961, dtype=np.float32).reshape(1, 1, 1, 961)
    p, integer, _ = quantized(Bent(activation), 1, 1, 961, data=[{"x": x}], weight_bits=8)
    found = pairs(integer)
    assert len(found) == 4  # the input, both convolutions, and the activation as a whole
    steps = [scale for scale, _ in found.values()]
    error = np.abs(outputs(p, x) - outputs(integer, x)).max()
    assert error <= 1.1 * steps[0] + 0.6 * steps[1] + steps[2] + steps[3]


# Q06: residual additions in every form


def _add_in_place(x, y):
    z = y.clone()
    z += x
    return z


ADDITIONS = {
    "x + f(x)": lambda x, f: x + f(x), "f(x) + x": lambda x, f: f(x) + x, "f(x) + f(x)": lambda x, f: f(x) + f(x),
    "y + y": lambda x, f: (lambda y: y + y)(f(x)), "three terms": lambda x, f: x + f(x) + f(f(x)),
    "torch.add": lambda x, f: torch.add(x, f(x)), "in place": lambda x, f: _add_in_place(x, f(x)),
    "with relu": lambda x, f: torch.relu(x + f(x)), "broadcast": lambda x, f: f(x) + f(x).mean((2, 3), keepdim=True),
    "of the input's slice": lambda x, f: f(x)[:, :2] + x[:, 2:], "alpha": lambda x, f: torch.add(f(x), x, alpha=2),
    "a number": lambda x, f: f(x) + 1.0, "subtracted": lambda x, f: f(x) - x,
}  # fmt: skip


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("form", ADDITIONS.values(), ids=ADDITIONS.keys())
def test_residual_additions_work_in_every_form(form, placement):
    """Q06: x + conv(x) calibrated elsewhere, and failed after the conversion."""

    class Plus(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            return form(x, self.conv)

    p, integer, report = quantized(Plus(), 4, 8, 8, placement=placement)
    assert report.coverage == 1.0
    x = batches(4, 8, 8, seed=9)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25


# Q07: two engines may round a tie either way


class Sum(nn.Module):
    def __init__(self, scales, zeros, product: bool):
        super().__init__()
        self.scales, self.zeros, self.product = scales, zeros, product

    def forward(self, x):
        def pair(value, k):
            given = (self.scales[k], self.zeros[k], 0, 255, torch.uint8)
            value = torch.ops.quantized_decomposed.quantize_per_tensor(value, *given)
            return torch.ops.quantized_decomposed.dequantize_per_tensor(value, *given)

        left, right = pair(x[:, 0], 0), pair(x[:, 1], 1)
        return pair(left * right if self.product else left + right, 2)


@pytest.mark.parametrize("product", [False, True])
def test_engines_differ_by_one_step_at_most_over_all_pairs_of_codes(product, tmp_path):
    """Q07: codes 158 and 136 gave 154 on one engine and 155 on another. All 65536 pairs, summed and multiplied."""
    import dataclasses

    scales, zeros = (0.0405626, 0.088816, 0.5 if product else 0.0902964), (112, 126, 124)
    codes = np.stack(np.meshgrid(np.arange(256), np.arange(256)), -1).reshape(1, -1, 2)
    values = ((codes - np.array(zeros[:2])) * np.array(scales[:2])).astype(np.float32).transpose(0, 2, 1)
    p = dataclasses.replace(program(Sum(scales, zeros, product), 2, codes.shape[1]), integer=True)
    session, kernels = in_onnxruntime(p, tmp_path)
    assert kernels["QLinearMul" if product else "QLinearAdd"] == 1
    ours = np.rint(outputs(p, values) / scales[2]).astype(int)
    theirs = np.rint(session.run(None, {"x": values})[0] / scales[2]).astype(int)
    assert np.abs(ours - theirs).max() <= 1
    at = int(np.flatnonzero((codes[0] == (158, 136)).all(1))[0])
    assert product or ours[0, at] + zeros[2] in (154, 155)


@pytest.mark.parametrize("kind", ["conv", "pool", "sigmoid"])
def test_a_layer_differs_by_one_step_at_most_between_simulation_and_kernel(kind, tmp_path):
    """Each with a step of its own behind it: what the fused kernel rounds otherwise is one step of that."""
    layers = {
        "conv": nn.Conv2d(4, 4, 3, padding=1),
        "pool": nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(2, 1)),
        "sigmoid": nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.MaxPool2d(1)),
    }
    _, integer, _ = quantized(layers[kind], 4, 8, 8)
    session, _ = in_onnxruntime(integer, tmp_path)
    x = batches(4, 8, 8, seed=5)[0]["x"]
    step = list(pairs(integer).values())[-1][0]
    assert np.abs(outputs(integer, x) - session.run(None, {"x": x})[0]).max() <= 1.01 * step


# Q12: modules and functions that are called more than once

block = nn.Sequential


class Twice(nn.Module):
    def __init__(self, part: nn.Module, between=lambda x: x):
        super().__init__()
        self.first, self.part, self.between, self.last = nn.Conv2d(3, 8, 3), part, between, nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.part(self.between(self.part(self.first(x))))
        return self.last(x)


SHARED = {
    "relu": (lambda: nn.ReLU(), lambda x: x - 0.1, 2),
    "relu6": (lambda: nn.ReLU6(), lambda x: x - 0.1, 2),
    "max pooling": (lambda: nn.MaxPool2d(2, 1), torch.relu, 2),
    "average pooling": (lambda: nn.AvgPool2d(2, 1), torch.relu, 2),
    "convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1), torch.relu, 4),
    "convolution without activation": (lambda: nn.Conv2d(8, 8, 3, padding=1), lambda x: x, 4),
    "block": (lambda: block(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1)), torch.relu, 6),
    "convolution and batch norm": (lambda: block(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)), torch.relu, 4),
    "batch norm": (lambda: nn.BatchNorm2d(8), torch.relu, 2),
    "leaky relu": (lambda: nn.LeakyReLU(0.1), lambda x: x, 2),
    "silu": (lambda: nn.SiLU(), lambda x: x, 2),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("make, between, convolutions", SHARED.values(), ids=SHARED.keys())
def test_a_part_that_is_called_twice_is_quantized_twice(make, between, convolutions, placement):
    """Q12: stock quantizers fail with 'Input partition has more than one output node'."""
    p, integer, report = quantized(Twice(make(), between), 3, 9, 9, placement=placement)
    assert report.counts["convolution"] == {"quantized": convolutions, "float": 0}
    x = batches(3, 9, 9, seed=2)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 20


@pytest.mark.parametrize("kind", ["convolution", "block", "max pooling"])
def test_a_part_that_is_called_twice_is_an_integer_kernel_each_time(kind, tmp_path):
    make, between, convolutions = SHARED[kind]
    _, integer, _ = quantized(Twice(make(), between), 3, 9, 9)
    kernels = kernels_of(integer, tmp_path)
    assert kernels.integer["QLinearConv"] == convolutions and not kernels.float_products
