"""Cross-layer equalization: the function stays, the ranges of the channels come together, integers get better."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.program import batches as _batches
from edgeopt.quant import convert, equalize
from tests.quant import models
from tests.quant.programs import batches, outputs, program, quantization, sqnr_db


def uneven(model: nn.Module, writers: str, readers: str) -> nn.Module:
    """Channels of very different range that matter alike: what the writers scale down the readers scale up again."""
    torch.manual_seed(3)
    for name in writers.split():
        layer = model.get_submodule(name)
        with torch.no_grad():
            scales = torch.logspace(0, -2, layer.weight.shape[0])
            layer.weight.mul_(scales.reshape(-1, *[1] * (layer.weight.ndim - 1)))
            layer.bias.mul_(scales)
    for name in readers.split():
        layer = model.get_submodule(name)
        split = scales.reshape(getattr(layer, "groups", 1), 1, -1)
        rows = split.expand(-1, layer.weight.shape[0] // split.shape[0], -1).reshape(layer.weight.shape[:2])
        with torch.no_grad():
            layer.weight.div_(rows.reshape(*rows.shape, *[1] * (layer.weight.ndim - 2)))
    return model


class Block(nn.Module):
    """Two writers and two readers of one residual stream."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.c(y + self.b(torch.relu(y)))


class Pooled(nn.Module):
    """Channels that pass pooling, a mean and a view before a linear takes them."""

    def __init__(self, mean: bool):
        super().__init__()
        self.conv, self.head, self.mean = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.max_pool2d(nn.functional.leaky_relu(self.conv(x), 0.1), 2)
        return self.head(y.mean((2, 3)) if self.mean else nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


class Padded(nn.Module):
    """A pad of its own between writer and reader."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.pad(torch.relu(self.a(x)), (0, 1, 0, 1)))


KINDS = {
    "conv2d": (lambda: uneven(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), "0", "2"), (3, 10, 10)),
    "conv1d": (lambda: uneven(nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)), "0", "2"), (3, 20)),
    "conv3d": (
        lambda: uneven(nn.Sequential(nn.Conv3d(2, 6, 3), nn.ReLU(), nn.Conv3d(6, 4, 1)), "0", "2"),
        (2, 6, 6, 6),
    ),
    "linear": (lambda: uneven(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), "0", "2"), (6,)),
    "linear of rows": (lambda: uneven(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), "0", "2"), (5, 6)),
    "depthwise": (
        lambda: uneven(
            nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
            "0", "2",
        ),
        (3, 10, 10),
    ),
    "grouped": (
        lambda: uneven(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4)), "0", "2"),
        (3, 10, 10),
    ),
    "residual": (lambda: uneven(Block(), "a b", "b c"), (6, 9, 9)),
    "pooled, mean": (lambda: uneven(Pooled(mean=True), "conv", "head"), (3, 12, 12)),
    "pooled, flattened": (lambda: uneven(Pooled(mean=False), "conv", "head"), (3, 12, 12)),
    "padded": (lambda: uneven(Padded(), "a", "b"), (3, 8, 8)),
}  # fmt: skip


def equalized(p, data):
    return equalize.equalize(p, [_batches.to_tensors(b, p.signature, where="") for b in data])


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_stays_and_integers_get_better(kind):
    make, sizes = KINDS[kind]
    p = program(make(), *sizes)
    data, other = batches(*sizes), batches(*sizes, count=1, size=32, seed=7)[0]["x"]
    even, did = equalized(p, data)
    assert "groups of channels" in did
    want = outputs(p, other)
    assert np.abs(outputs(even, other) - want).max() <= 1e-5 * np.abs(want).max()
    error = {}
    for method in ((), ("equalize",)):
        integer, report = convert.from_batches(p, quantization(improve=method, weight_bits=8), data)
        error[method] = sqnr_db(want, outputs(integer, other))
        assert list(report.improved) == list(method)
    assert error["equalize",] > error[()] + 1


def test_a_clamp_is_never_reached_by_what_did_not_reach_it():
    """ReLU6 lets no scale through; channels below it are scaled up to it, those at it stay."""
    model = uneven(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8)), "0", "2")
    with torch.no_grad():
        model[0].weight.mul_(12)
    p, data = program(model, 3, 10, 10), batches(3, 10, 10)
    even, _ = equalized(p, data)
    for batch in data:
        want = outputs(p, batch["x"])
        assert np.abs(outputs(even, batch["x"]) - want).max() <= 1e-5 * np.abs(want).max()
    scales = (even.module.get_parameter("model.0.bias") / p.module.get_parameter("model.0.bias")).detach()
    assert float(scales[0]) == pytest.approx(1.0)  # it reaches 6
    assert float(scales[-1]) > 10


@pytest.mark.parametrize(
    "model, sizes",
    [
        (models.Tied(), (4, 8, 8)),
        (models.Gated(nn.SiLU()), (3, 8, 8)),
        (models.Branches(), (3, 6, 6)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), (3, 6, 6)),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1)), (3, 6, 6)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 2)), (3, 4, 4)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(0.5, 2.0), nn.Conv2d(4, 2, 1)), (3, 4, 4)),
    ],
    ids=["tied weights", "SiLU", "concat", "an output", "an input", "mixed channels", "a clamp without 0"],
)
def test_what_no_scale_passes_is_left_alone(model, sizes):
    p = program(model, *sizes)
    even, did = equalized(p, batches(*sizes))
    assert did == "no layers whose channels can be scaled together"
    assert even is p


def test_the_given_program_is_not_written_to():
    make, sizes = KINDS["conv2d"]
    p = program(make(), *sizes)
    before = {name: value.clone() for name, value in p.module.state_dict().items()}
    equalized(p, batches(*sizes))
    assert all(torch.equal(value, before[name]) for name, value in p.module.state_dict().items())


def test_a_convolution_without_an_axis_of_samples_is_left_alone():
    """torch takes [channels, h, w] too, where axis 1 is no axis of channels."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x.mean(0))))[None]

    p = program(Whole(), 4, 4, 4)
    _, did = equalized(p, batches(4, 4, 4))
    assert did == "no layers whose channels can be scaled together"
    _, report = convert.from_batches(p, quantization(), batches(4, 4, 4))
    assert report.improved["rounding"].startswith("0 layers")


def test_a_weight_under_two_names_is_scaled_and_rounded_for_each_by_itself():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 4, 1)
            uneven(nn.Sequential(self.a, self.c), "0", "1")
            self.b.weight = nn.Parameter(self.a.weight.data)  # another tensor over the same memory

        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    torch.manual_seed(0)
    tied = Twice()
    apart = copy.deepcopy(tied)
    apart.b.weight = nn.Parameter(tied.b.weight.detach().clone())
    data = batches(6, 8, 8)
    x, given = data[0]["x"], [program(model, 6, 8, 8) for model in (tied, apart)]
    exact = outputs(given[1], x)
    for p in given:
        made, said = equalized(p, data)
        assert said.startswith("2 groups")
        np.testing.assert_allclose(outputs(made, x), exact, rtol=1e-3, atol=1e-3 * np.abs(exact).max())
    integers = [outputs(convert.from_batches(p, quantization(), data)[0], x) for p in given]
    np.testing.assert_array_equal(*integers)
