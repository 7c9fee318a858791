"""Distillation: the quantized program comes nearer to the float one on samples that it did not see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.program.qdq import is_dequantize
from edgeopt.quant import convert, distill, learned, variations
from tests.quant import models
from tests.quant.programs import batches, in_onnxruntime, outputs, program, quantization, sqnr_db


class Deep(nn.Module):
    """A stem and two depthwise blocks with ReLU6, as in the networks that lose most by 7 bits."""

    def __init__(self):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU6()]
        for _ in range(2):
            layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 8, 1), nn.ReLU6()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


@pytest.fixture
def short(monkeypatch):
    """Few steps at higher rates: small networks, little time."""
    monkeypatch.setattr(distill, "ROUNDS", 60)
    monkeypatch.setattr(distill, "CHECK_EVERY", 10)
    monkeypatch.setattr(distill, "RATES", {kind: 4 * rate for kind, rate in distill.RATES.items()})


def test_it_comes_nearer_on_other_data_also_in_onnxruntime(short, tmp_path):
    p, data = program(Deep(), 3, 16, 16), batches(3, 16, 16, size=16)
    other = batches(3, 16, 16, count=1, size=64, seed=5)[0]["x"]
    plain, _ = convert.from_batches(p, quantization(improve=()), data)
    learnt, report = convert.from_batches(p, quantization(improve=("distill",)), data)
    wanted = outputs(p, other)
    assert " steps, " in report.improved["distill"]
    assert sqnr_db(wanted, outputs(learnt, other)) > sqnr_db(wanted, outputs(plain, other)) + 1
    session, _ = in_onnxruntime(learnt, tmp_path)
    lowered = session.run(None, {"x": other})[0]
    assert sqnr_db(outputs(learnt, other), lowered) > 30


def test_twice_is_the_same_and_leaves_the_random_state_alone(short):
    p, data, x = program(Deep(), 3, 16, 16), batches(3, 16, 16), batches(3, 16, 16, seed=5)[0]["x"]
    how = quantization(improve=("rounding", "distill"))
    first, _ = convert.from_batches(p, how, data)
    torch.manual_seed(77)
    second, _ = convert.from_batches(p, how, data)
    assert float(torch.rand(())) == float(torch.rand((), generator=torch.Generator().manual_seed(77)))
    assert np.array_equal(outputs(first, x), outputs(second, x))


@pytest.mark.parametrize("per_channel", [True, False])
def test_what_is_stored_is_what_was_learnt(short, monkeypatch, per_channel):
    """The error on held-out samples, taken again of the converted program, is the one that the state was kept for."""
    found: list[distill.Distilled] = []
    plain = distill.distill
    monkeypatch.setattr(distill, "distill", lambda *a, **k: found.append(plain(*a, **k)) or found[-1])
    p, data = program(Deep(), 3, 16, 16), batches(3, 16, 16, count=1, size=40)
    integer, _ = convert.from_batches(p, quantization(improve=("distill",), per_channel=per_channel), data)
    held = data[0]["x"][distill.HELD_OUT - 1 :: distill.HELD_OUT]
    assert found[0].rounds and found[0].after < found[0].before
    assert sqnr_db(outputs(p, held), outputs(integer, held)) == pytest.approx(-10 * np.log10(found[0].after), abs=1.0)


def test_a_worse_state_is_never_kept(monkeypatch):
    monkeypatch.setattr(distill, "RATES", {kind: 10.0 for kind in distill.RATES})
    p, data = program(models.Net(), 3, 16, 16), batches(3, 16, 16)
    x = batches(3, 16, 16, seed=5)[0]["x"]
    plain, _ = convert.from_batches(p, quantization(improve=()), data)
    same, report = convert.from_batches(p, quantization(improve=("distill",)), data)
    assert report.improved["distill"].startswith("no gain on held-out samples (")
    assert np.array_equal(outputs(same, x), outputs(plain, x))


@pytest.mark.parametrize("case", ["few samples", "one batch too few"])
def test_too_little_data_changes_nothing_and_says_so(case):
    p = program(models.Net(), 3, 16, 16)
    data = batches(3, 16, 16, count=1, size=12) if case == "few samples" else batches(3, 16, 16, count=2, size=4)
    integer, report = convert.from_batches(p, quantization(improve=("distill",)), data)
    plain, _ = convert.from_batches(p, quantization(improve=()), data)
    assert report.improved["distill"].startswith("not done: ")
    x = batches(3, 16, 16, seed=3)[0]["x"]
    assert np.array_equal(outputs(integer, x), outputs(plain, x))


def test_a_shared_weight_learns_as_one(short):
    p, data = program(models.Tied(), 4, 8, 8), batches(4, 8, 8)
    x = np.concatenate([batch["x"] for batch in data])
    integer, report = convert.from_batches(p, quantization(improve=("distill",)), data)
    plain, _ = convert.from_batches(p, quantization(improve=()), data)
    assert " steps, " in report.improved["distill"]
    kept = [[v for v in q.module.state_dict().values() if v.dtype == torch.int8] for q in (plain, integer)]
    assert len(kept[0]) == len(kept[1])
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > sqnr_db(outputs(p, x), outputs(plain, x))


def test_data_of_varying_size_and_of_other_ranks(short):
    """Audio-like [batch, channels, size] of two sizes: pools of their own, and nothing is cropped or mirrored."""
    p = program(
        nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 2, 3, padding=1)), 4, 24, varying=2
    )
    data = [*batches(4, 24, count=2, size=16), *batches(4, 40, count=2, size=16)]
    other = batches(4, 32, seed=5)[0]["x"]
    plain, _ = convert.from_batches(p, quantization(improve=()), data)
    learnt, report = convert.from_batches(p, quantization(improve=("distill",)), data)
    assert not report.improved["distill"].startswith("not done")
    assert sqnr_db(outputs(p, other), outputs(learnt, other)) > sqnr_db(outputs(p, other), outputs(plain, other)) - 0.5


def test_gradients_are_those_of_learned_steps():
    """Against the formula, value by value: inside, below and above the range, for the input and for the scale."""
    x = torch.tensor([-3.0, -0.26, 0.3, 0.74, 9.0], requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    y = learned._Rounded.apply(x, scale, -2, 4)
    assert y.tolist() == [-1.0, -0.5, 0.5, 0.5, 2.0]
    for i, wanted in enumerate([-2.0, -1 + 0.52, 1 - 0.6, 1 - 1.48, 4.0]):
        gx, gs = torch.autograd.grad(y[i], (x, scale), retain_graph=True)
        assert float(gs) == pytest.approx(wanted, abs=1e-5)
        assert gx.tolist() == [float(j == i and 0 < i < 4) for j in range(5)]


def test_pictures_vary_and_other_inputs_do_not():
    generator = torch.Generator().manual_seed(0)
    picture = torch.rand(2, 3, 24, 32)
    (varied,) = variations.vary([picture], generator)
    assert varied.shape == picture.shape and not torch.equal(varied, picture)
    assert varied.min() >= picture.min() and varied.max() <= picture.max()  # interpolated, never beyond
    for other in (
        torch.rand(2, 8, 24, 24),
        torch.rand(2, 3, 24),
        torch.rand(2, 3, 8, 8),
        torch.ones(2, 3, 24, 24).int(),
    ):
        assert variations.vary([other], generator)[0] is other


def test_integers_stay_within_their_bits(short):
    p, data = program(Deep(), 3, 16, 16), batches(3, 16, 16)
    integer, _ = convert.from_batches(p, quantization(improve=("distill",), weight_bits=7), data)
    stored = [v for v in integer.module.state_dict().values() if v.dtype == torch.int8]
    assert stored and all(int(v.min()) >= -64 and int(v.max()) <= 63 for v in stored)
    assert any(is_dequantize(node) for node in integer.module.graph.nodes)
