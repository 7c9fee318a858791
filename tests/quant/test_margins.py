"""The margin below a clamp: chosen by samples that the ranges were not taken from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.program import batches as _batches
from edgeopt.quant import convert, equalize, margins
from tests.quant.programs import batches, outputs, program, quantization


class Uneven(nn.Module):
    """Depthwise layers between clamps, whose channels differ in size by up to 64."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU6):
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last, self.activation = nn.Conv2d(8, 4, 1), activation()
        with torch.no_grad():
            sizes = 40 * 2.0 ** -torch.arange(8.0)
            self.first.weight.mul_(sizes.reshape(-1, 1, 1, 1))
            self.first.bias.mul_(sizes)
            self.last.weight.copy_(self.last.weight / sizes.reshape(1, -1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.depthwise(self.activation(self.first(x)))))


def data(larger: float = 1.0, *, size: int = 16, seed: int = 0) -> list[dict]:
    """Every other sample is `larger` times the one before it, as pictures of an exposure that was not calibrated."""
    sizes = np.where(np.arange(size) % 2, larger, 1.0).astype(np.float32).reshape(-1, 1, 1, 1)
    return [{"x": b["x"] * sizes} for b in batches(3, 8, 8, size=size, seed=seed, scale=0.3)]


def kept(p, given: list[dict]):
    return [_batches.to_tensors(b, p.signature, where="") for b in given]


def test_other_samples_that_are_larger_want_a_wide_margin_and_equal_ones_a_narrow_one():
    p = program(Uneven(), 3, 8, 8)
    assert margins.chosen(p, quantization(), kept(p, data(6.0))) == max(margins.MARGINS)
    assert margins.chosen(p, quantization(), kept(p, data())) < max(margins.MARGINS)


def test_the_build_takes_it_and_says_so():
    p, given = program(Uneven(), 3, 8, 8), data(6.0)
    integer, report = convert.from_batches(p, quantization(improve=("equalize",), weight_bits=8), given)
    even, words = equalize.equalize(p, kept(p, given), margin=max(margins.MARGINS))
    alike, _ = convert.from_batches(even, quantization(improve=(), weight_bits=8), given)
    assert report.improved["equalize"] == f"{words}; 6 times below clamps"
    assert np.array_equal(outputs(integer, given[0]["x"]), outputs(alike, given[0]["x"]))


@pytest.mark.parametrize("case", ["no clamp", "few samples", "one batch of a fixed size"])
def test_where_nothing_can_be_chosen_the_usual_one_is_taken_without_a_try(case, monkeypatch):
    monkeypatch.setattr(margins, "_rounded", lambda *a: pytest.fail("it was tried"))
    p = program(Uneven(nn.ReLU if case == "no clamp" else nn.ReLU6), 3, 8, 8)
    given = kept(p, data(6.0))
    if case == "few samples":
        given = [[given[0][0][:6]]]
    if case == "one batch of a fixed size":
        monkeypatch.setattr(margins.samples, "by_rows", lambda signature: False)
        given = [[torch.cat([b[0] for b in given])]]
    assert margins.chosen(p, quantization(), given) == equalize.MARGIN


def test_layers_that_stay_float_are_float_in_the_tries():
    p, given = program(Uneven(), 3, 8, 8), data(6.0)
    everything = ("model.first", "model.depthwise", "model.last")
    assert margins.chosen(p, quantization(), kept(p, given), keep_float=everything) == max(margins.MARGINS)
