"""Clipping ranges against a search of everything on the raw values, on distributions whose best range is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edgeopt.quant import observers
from edgeopt.quant.histogram import Histogram

COUNT = 8_000
UNSIGNED = {"dtype": torch.uint8, "qscheme": torch.per_tensor_affine, "quant_min": 0, "quant_max": 255}
SIGNED = {"dtype": torch.int8, "qscheme": torch.per_tensor_symmetric, "quant_min": -128, "quant_max": 127}
SCHEMES = {"uint8": UNSIGNED, "int8": SIGNED}


def drawn(name: str) -> torch.Tensor:
    torch.manual_seed(5)
    x = torch.randn(COUNT)
    return {
        "normal": x,
        "shifted": x + 2,
        "relu": x.relu(),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((COUNT,)),
        "heavy": torch.distributions.StudentT(3.0).sample((COUNT,)),
        "negative": -x.abs() - 0.3,
        "silu": torch.nn.functional.silu(3 * x),
        "tiny": x * 1e-6,
        "huge": x * 1e6,
    }[name]


DISTRIBUTIONS = ("normal", "shifted", "relu", "laplace", "heavy", "negative", "silu", "tiny", "huge")


def calibrated(kind: type, scheme: dict, *parts: torch.Tensor):
    observer = kind(**scheme)
    for part in parts:
        observer(part)
    return observer


def squared_error(observer, x: torch.Tensor, low: float, high: float) -> float:
    """Of quantizing the raw values with the range that the observer would be given, as torch does it."""
    scale, zero = observer._calculate_qparams(torch.tensor(low), torch.tensor(high))
    limits = observer.quant_min, observer.quant_max
    return float((torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero), *limits) - x).square().sum())


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_range_of_least_error_is_the_one_that_a_search_of_everything_finds(name, scheme):
    """20 x 20 ranges, both ends from a tenth of the whole range to all of it; what the bins' width leaves is 1 %."""
    x = drawn(name)
    observer = calibrated(observers.LeastErrorObserver, scheme, *x.split(3000))
    found = squared_error(observer, x, *map(float, observer.range()))
    ends = np.linspace(0.1, 1, 20)
    whole = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    if scheme is SIGNED:
        largest = max(-whole[0], whole[1])
        tried = [(-largest * part, largest * part) for part in np.linspace(0.1, 1, 200)]
    else:
        lows = whole[0] * ends if whole[0] else [0.0]
        highs = whole[1] * ends if whole[1] else [0.0]
        tried = [(low, high) for low in lows for high in highs]
    least = min(squared_error(observer, x, low, high) for low, high in tried)
    assert found <= 1.01 * least


def test_clipping_gains_nothing_for_values_on_a_grid():
    """Pictures: 256 values, each an integer of the whole range."""
    x = torch.randint(0, 256, (COUNT,), generator=torch.Generator().manual_seed(1)) / 255
    observer = calibrated(observers.LeastErrorObserver, UNSIGNED, x)
    assert tuple(map(float, observer.range())) == (0.0, 1.0)


def test_a_normal_distribution_is_clipped_where_theory_says():
    """Bits 8, symmetric: the best clipping is 3.92 deviations (Banner et al., "Post training 4-bit quantization",
    NeurIPS 2019, equation 7 solved for 8 bits; their Laplace constant is 9.89 scales)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400_000, generator=generator)
    observer = calibrated(observers.LeastErrorObserver, SIGNED, *x.split(20_000))
    assert -float(observer.range()[0]) == pytest.approx(3.92, rel=0.03)
    uniform = torch.rand(400_000, generator=generator) - 0.5
    x = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    observer = calibrated(observers.LeastErrorObserver, SIGNED, *x.split(20_000))
    assert float(observer.range()[1]) == pytest.approx(9.89, rel=0.05)


def divergence(x: np.ndarray, low: float, high: float, scale: float, zero: int, least: int, most: int, width: float):
    """Kullback-Leibler divergence of clipping raw values, written out bin by bin."""
    x = x[x != 0]
    first, end = round(low / width), round(high / width)
    edges = np.arange(first, end + 1) * width
    held = np.histogram(x[(x >= edges[0]) & (x < edges[-1])], edges)[0].astype(float)
    wanted = held.copy()
    wanted[0] += (x < edges[0]).sum()
    wanted[-1] += (x >= edges[-1]).sum()
    told = np.zeros_like(held)
    centres = (edges[:-1] + edges[1:]) / 2
    codes = np.clip(np.round(centres / scale) + zero, least, most)
    for code in np.unique(codes):
        mine = (codes == code) & (held > 0)
        if mine.any():
            told[mine] = held[mine].sum() / mine.sum()
    wanted, told = wanted / wanted.sum(), told / told.sum()
    return sum(w * math.log(w / max(t, 1e-12)) for w, t in zip(wanted, told, strict=True) if w)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("name", ["normal", "relu", "laplace", "heavy"])
def test_the_range_of_least_divergence_is_the_one_that_a_search_of_everything_finds(name, scheme):
    x = drawn(name)
    observer = calibrated(observers.EntropyObserver, scheme, *x.split(3000))
    largest = float(x.abs().max())
    losses = []
    for bins in range(128, 1025, 32):
        low, high = max(min(float(x.min()), 0.0), -largest * bins / 1024), min(float(x.max()), largest * bins / 1024)
        scale, zero = observer._calculate_qparams(torch.tensor(low), torch.tensor(high))
        limits = (float(scale), int(zero), observer.quant_min, observer.quant_max)
        losses.append(divergence(x.double().numpy(), low, high, *limits, largest / 1024))
    low, high = map(float, observer.range())
    scale, zero = observer._calculate_qparams(torch.tensor(low), torch.tensor(high))
    limits = (float(scale), int(zero), observer.quant_min, observer.quant_max)
    found = divergence(x.double().numpy(), low, high, *limits, largest / 1024)
    # values within half a bin of an edge may count on its other side in the histogram
    assert found <= 1.05 * min(losses)


@pytest.mark.parametrize("kind", [observers.PercentileObserver, observers.EntropyObserver])
@pytest.mark.parametrize("outlier", [1000.0, -1000.0, 3e5])
def test_one_far_value_does_not_set_the_scale(kind, outlier):
    """Q04: 1e5 normals and one 1000: the whole range has a scale of 3.9, a clipped one of about .035."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    observer = calibrated(kind, UNSIGNED, *x.split(25_000), torch.tensor([outlier]))
    assert float(observer.calculate_qparams()[0]) == pytest.approx(0.032, rel=0.2)
    whole = calibrated(observers.MinMaxObserver, UNSIGNED, *x.split(25_000), torch.tensor([outlier]))
    assert float(whole.calculate_qparams()[0]) > 3.9


@pytest.mark.parametrize("kind", [observers.LeastErrorObserver, observers.EntropyObserver])
@pytest.mark.parametrize("value", [0.0, 7.0, -7.0, 1e-30])
def test_a_constant_has_a_range_that_holds_it(kind, value):
    observer = calibrated(kind, UNSIGNED, torch.full((100,), value))
    scale, zero = observer.calculate_qparams()
    found = torch.fake_quantize_per_tensor_affine(torch.tensor(value), float(scale), int(zero), 0, 255)
    assert float(found) == pytest.approx(value, rel=1e-2, abs=1e-9)


@pytest.mark.filterwarnings("ignore:must run observer")
def test_an_observer_that_saw_nothing_has_the_scale_of_torchao():
    for kind in observers._RANGES.values():
        observer = kind(**UNSIGNED)
        observer(torch.zeros(0, 3))
        assert float(observer.calculate_qparams()[0]) == 1


def test_bins_count_every_value_once_whatever_comes_first():
    torch.manual_seed(0)
    parts = [torch.randn(1000) * scale for scale in (1e-3, 1.0, 1e3, 1e-12)] + [torch.zeros(10)]
    for order in (parts, parts[::-1]):
        histogram = Histogram()
        for part in order:
            histogram.add(part)
        means, counts = histogram.bins()
        everything = torch.cat(parts).double()
        assert float(counts.sum()) == len(everything)
        assert float((means * counts).sum()) == pytest.approx(float(everything.sum()), abs=1e-6)
        assert bool((means.diff() > 0).all())
        for value in (0.01, 0.5, 30.0):  # what is a million times smaller than the largest is one bin
            assert float(counts[means > value].sum()) == pytest.approx(float((everything > value).sum()), rel=0.01)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 40, 40), (4, 100, 300), ()])
def test_the_layout_in_memory_changes_no_range(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    views = [x, x.t() if x.ndim == 2 else x.transpose(0, -1) if x.ndim else x]
    views += [x.contiguous(memory_format=torch.channels_last)] if x.ndim == 4 else []
    for kind in (observers.MinMaxObserver, observers.MovingAverageObserver):
        ranges = {tuple(map(float, calibrated(kind, UNSIGNED, view).range())) for view in views}
        assert ranges == {(float(x.min()), float(x.max()))}


def test_the_deviation_is_that_of_all_batches_together_without_their_extremes():
    torch.manual_seed(0)
    parts = [torch.randn(size) * scale + 1000 for size, scale in ((10, 1), (2000, 3), (1, 1), (500, 0.1))]
    observer = calibrated(observers.MinMaxObserver, UNSIGNED, *parts)
    kept = torch.cat([part.sort().values[1:-1] if len(part) > 3 else part for part in parts]).double()
    assert observer.deviation() == pytest.approx(float(kept.std(correction=0)), rel=1e-3)


@pytest.mark.parametrize("outliers", [[1000.0], [-1000.0, 1000.0]])
def test_an_outlier_does_not_hide_itself(outliers):
    """All of a batch is in its sample here, so that the outlier is as well."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    x[: len(outliers)] = torch.tensor(outliers)
    assert calibrated(observers.MinMaxObserver, UNSIGNED, x).deviation() == pytest.approx(1, rel=0.1)


def test_a_moving_average_is_torchaos():
    from edgeopt.quant import pt2e

    torch.manual_seed(0)
    parts = torch.randn(7, 100).unbind()
    ours = calibrated(observers.MovingAverageObserver, UNSIGNED, *parts)
    theirs = calibrated(pt2e.MovingAverageMinMaxObserver, UNSIGNED, *parts)
    for a, b in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)
