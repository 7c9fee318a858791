"""Rounding by the layer's outputs: against the nearest steps, against every lattice point, and on other data."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.program import batches as _batches
from edgeopt.quant import convert, improve, moments, rounding, samples
from edgeopt.quant.channels import LAYERS
from edgeopt.quant.prepare import complete_metadata
from edgeopt.quant.rules import operator
from tests.quant import models
from tests.quant.programs import batches, outputs, program, quantization, sqnr_db


def of_inputs(x: torch.Tensor, e: torch.Tensor | None = None) -> moments.Moments:
    """Moments of inputs [groups, d, positions] and of what the exact ones are off by."""
    x, e = x.double(), torch.zeros_like(x).double() if e is None else e.double()
    n = x.shape[2]
    return moments.Moments(x @ x.mT / n, e @ x.mT / n, x.mean(2), e.mean(2), n)


def task(inputs: int, *, groups: int = 1, rows: int = 6, limits=(-64, 63), seed: int = 0, **how) -> rounding.Task:
    weights = torch.randn(groups, rows, inputs, generator=torch.Generator().manual_seed(seed))
    return rounding.Task(weights, weights.abs().amax(-1) / limits[1], limits, **how)


def correlated(groups: int, inputs: int, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(groups, inputs, inputs, generator=torch.Generator().manual_seed(9))
    return mixed @ torch.randn(groups, inputs, count, generator=generator) + 0.5


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("groups, inputs", [(1, 4), (5, 9), (1, 64)])
@pytest.mark.parametrize("shrinkage", [0.02, 0.6, 1.0])
def test_no_row_is_worse_than_its_nearest_steps(groups, inputs, centred, shrinkage):
    given = task(inputs, groups=groups, limits=(-4, 3), centred=centred)
    seen = of_inputs(correlated(groups, inputs, 500))
    found = rounding.best(given, seen, shrinkage, rounding.SHRINK)
    hessian = rounding._shrunk((seen.centred() if centred else seen).hessian, shrinkage).float()
    nearest = rounding._steps(given.weights, given.scales, given.limits)
    assert bool((found.errors <= rounding._errors(nearest, given.weights, hessian) + 1e-6).all())
    steps = found.weights / found.scales[..., None]
    assert torch.allclose(steps, steps.round(), atol=1e-4) and steps.min() >= -4.001 and steps.max() <= 3.001


def test_it_is_near_the_best_of_all_lattice_points():
    given = task(4, rows=8, limits=(-3, 3))
    seen = of_inputs(correlated(1, 4, 500))
    hessian = rounding._shrunk(seen.centred().hessian, 0.02).float()
    found = rounding.best(given, seen, 0.02, (1.0,))
    lattice = torch.tensor(list(itertools.product(range(-3, 4), repeat=4))).float()
    for row in range(8):
        every = lattice * given.scales[0, row]
        least = rounding._errors(every[None], given.weights[:, row, None], hessian).min()
        assert least - 1e-5 <= found.errors[0, row] <= 1.5 * least + 1e-5


@pytest.mark.parametrize("samples_, inputs", [(8, 64), (40, 16), (4000, 16)])
def test_on_held_out_data_it_is_no_worse_than_the_nearest(samples_, inputs):
    """Eight samples of 64 inputs fit anything; what was fitted on one half is judged on the other."""
    given = task(inputs)
    one, other = (of_inputs(correlated(1, inputs, samples_, seed)) for seed in (1, 2))
    found = rounding.search(given, one, other)
    tried = rounding.best(given, one, found.shrinkage, (1.0,), sweeps=0)
    nearest = rounding.best(given, one, 1.0, (1.0,), sweeps=0)
    assert rounding._held_out(given, tried, one, other).sum() <= rounding._held_out(given, nearest, one, other).sum()
    if samples_ == 4000:
        assert found.shrinkage < 0.5


def test_weights_are_fitted_to_inputs_that_are_off():
    """Inputs come 10 % too large: the weights shrink by as much, which no rounding alone could do."""
    x = correlated(1, 6, 4000)
    given = task(6, rows=3, limits=(-64, 63))
    found = rounding.best(given, of_inputs(1.1 * x, x - 1.1 * x), 0.02, (1.0,))
    exact = given.weights @ (x - x.mean(2, keepdim=True))
    error = {}
    for name, weights in (("fitted", found.weights), ("as they were", given.weights)):
        error[name] = (weights @ (1.1 * (x - x.mean(2, keepdim=True))) - exact).square().mean()
    assert error["fitted"] < error["as they were"] / 10


LAYER_KINDS = {
    "conv2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 9, 8)),
    "dilated": (nn.Conv2d(4, 6, (3, 2), dilation=2, padding=(2, 1)), (4, 9, 8)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (4, 7, 7)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6, padding=1), (6, 7, 7)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 11)),
    "conv3d": (nn.Conv3d(2, 4, 2, padding=1), (2, 4, 5, 3)),
    "linear": (nn.Linear(5, 3), (5,)),
    "linear of rows": (nn.Linear(5, 3), (4, 5)),
    "no bias": (nn.Conv2d(4, 6, 3, bias=False), (4, 9, 8)),
}


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_columns_times_rows_are_what_the_layer_gives(kind):
    layer, sizes = LAYER_KINDS[kind]
    p = program(layer, *sizes)
    complete_metadata(p.module, p)
    node = next(n for n in p.module.graph.nodes if operator(n) in LAYERS)
    x, weight = torch.randn(2, *sizes), layer.weight.detach()
    groups = getattr(layer, "groups", 1)
    columns = moments._columns(node, x, weight, groups, 1 << 20, 0)
    given = rounding._rows(weight, node) @ columns  # [groups, rows, positions]
    with torch.no_grad():
        want = layer(x) - layer(torch.zeros_like(x))
    axis = want.ndim - 1 if kind.startswith("linear") else 1
    want = want.movedim(axis, 0).reshape(groups, -1, given.shape[2])
    assert torch.allclose(given, want, atol=1e-5)
    few = moments._columns(node, x, weight, groups, 8, 1)
    assert 0 < few.shape[2] <= max(20, given.shape[2])


def deep(layer, *sizes: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(layer(4, 8), nn.ReLU(), layer(8, 8), nn.ReLU(), layer(8, 3))


@pytest.mark.parametrize(
    "layer, sizes",
    [
        (lambda i, o: nn.Conv2d(i, o, 3), (4, 12, 12)),
        (lambda i, o: nn.Conv1d(i, o, 5, bias=False), (4, 40)),
        (lambda i, o: nn.Conv2d(i, o, 3, groups=1 if o == 3 else 4), (4, 12, 12)),
        (lambda i, o: nn.Linear(i, o), (4,)),
    ],
    ids=["conv2d", "conv1d without bias", "grouped", "linear"],
)
@pytest.mark.parametrize("per_channel", [True, False])
def test_integers_are_nearer_on_other_data(layer, sizes, per_channel):
    """Smooth inputs, as pictures are, where rounding errors of neighbours can make up for each other."""
    p = program(deep(layer), *sizes)
    data = [{"x": smooth(b["x"])} for b in batches(*sizes, size=32)]
    other = smooth(batches(*sizes, count=1, size=64, seed=5)[0]["x"])
    error = {}
    for methods in ((), ("rounding",)):
        how = quantization(improve=methods, per_channel=per_channel, weight_bits=7)
        integer, report = convert.from_batches(p, how, data)
        error[methods] = sqnr_db(outputs(p, other), outputs(integer, other))
    assert report.improved["rounding"] == "3 layers on 128 samples"
    assert error["rounding",] > error[()] - (1 if len(sizes) == 1 else -1)


def smooth(x: np.ndarray) -> np.ndarray:
    for axis in range(2, x.ndim):
        x = (x + np.roll(x, 1, axis) + np.roll(x, 2, axis)) / 2
    return x + 0.5


def test_a_weight_that_two_layers_share_keeps_its_value():
    p = program(models.Tied(), 4, 8, 8)
    plain, _ = convert.from_batches(p, quantization(improve=()), batches(4, 8, 8))
    rounded, report = convert.from_batches(p, quantization(improve=("rounding",)), batches(4, 8, 8))
    assert report.improved["rounding"].startswith("0 layers") and "left as they were: " in report.improved["rounding"]
    kept = [[v for v in q.module.state_dict().values() if v.dtype == torch.int8] for q in (plain, rounded)]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.parametrize("method", ["rounding", "biases"])
def test_few_samples_change_nothing_and_say_so(method):
    p, data = program(models.Net(), 3, 16, 16), batches(3, 16, 16, count=1, size=4)
    integer, report = convert.from_batches(p, quantization(improve=(method,)), data)
    plain, _ = convert.from_batches(p, quantization(improve=()), data)
    assert report.improved == {method: "not done: 4 samples say too little, it takes 8"}
    x = batches(3, 16, 16, seed=3)[0]["x"]
    assert np.array_equal(outputs(integer, x), outputs(plain, x))


def test_samples_are_held_within_bounds_and_the_stream_is_whole(monkeypatch):
    p = program(models.Net(), 3, 16, 16)
    monkeypatch.setattr(samples, "HELD_ELEMENTS", 2 * 8 * 3 * 16 * 16)
    data = batches(3, 16, 16, count=5)
    kept, stream = samples.held(iter(data), p.signature, limit=4)
    assert [samples.count(batch) for batch in kept] == [8, 8]
    assert [id(batch) for batch in stream] == [id(batch) for batch in data[:4]]


def test_a_walk_takes_some_of_every_batch(monkeypatch):
    p = program(models.Net(), 3, 16, 16)
    complete_metadata(p.module, p)
    kept = [_batches.to_tensors(b, p.signature, where="") for b in batches(3, 16, 16, count=3)]
    assert [samples.count(b) for b in samples.spread(p, kept)] == [8, 8, 8]
    assert [samples.count(b) for b in samples.spread(p, kept[:1])] == [4, 4]  # so that one can judge the other
    monkeypatch.setattr(samples, "WALKED_ELEMENTS", 12 * samples.TENSORS_AT_ONCE * 8 * 8 * 8)
    assert [samples.count(b) for b in samples.spread(p, kept)] == [4, 4, 4]
    assert improve.LEAST_SAMPLES <= 12


@pytest.mark.parametrize("far", [0.0, 1000.0])
def test_moments_are_those_of_all_batches(far):
    """Also far from 0, where float32 products alone would lose the variance."""
    p = program(nn.Linear(4, 2), 4)
    node = next(n for n in p.module.graph.nodes if operator(n) in LAYERS)
    rounded = torch.randn(3, 50, 4) + far
    exact = rounded + torch.randn_like(rounded)
    seen = moments.of(node, list(zip(exact, rounded, strict=True)), torch.zeros(2, 4)).centred()
    x, e = (value.reshape(-1, 4).double() for value in (rounded, exact - rounded))
    assert torch.allclose(seen.mean[0], x.mean(0)) and torch.allclose(seen.off[0], e.mean(0), atol=1e-4)
    assert torch.allclose(seen.hessian[0], x.T.cov(correction=0), atol=1e-3)
    assert torch.allclose(seen.cross[0], (e - e.mean(0)).T @ (x - x.mean(0)) / len(x), atol=1e-3)
