"""Small models whose values, weights or positions leave what fp16 or bf16 holds: they keep fp32 there.

Each is compared with the fp32 model in torch, as an ONNX file in onnxruntime and as TorchScript.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.passes.half import half
from edgeopt.program import graph
from tests.passes.half_support import BOUND, converted, in_onnxruntime, in_torchscript, sqnr_db, types_of


class DecomposedNorm(nn.Module):
    """[n, 16, 64] -> RMS norm written out, and a projection."""

    def __init__(self, eps: float):
        super().__init__()
        torch.manual_seed(0)
        self.eps, self.project = eps, nn.Linear(64, 64)

    def forward(self, x):
        x = x * 150
        return self.project(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class LayerNorm(nn.Module):
    def __init__(self, eps: float):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.project = nn.LayerNorm(64, eps=eps), nn.Linear(64, 64)

    def forward(self, x):
        return self.project(self.norm(x * 150))


class Squares(LayerNorm):
    """The variance by a product, which no list of operators knows."""

    def forward(self, x):
        x = x * 150
        return self.project(x / (x * x).mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("model", [DecomposedNorm, LayerNorm, Squares])
def test_a_norm_of_rows_of_300_does_not_overflow(model, eps, tmp_path):
    float32, result, report = converted(model(eps), ("N", 16, 64))
    assert report.refused is None and types_of(result)["linear"] == {"float16"}
    inputs = float32.reference[0].inputs
    assert np.abs(inputs["x0"] * 150).max() > 256  # whose square is no fp16
    wanted = graph.run(float32, inputs)
    for found in (graph.run(result, inputs), in_onnxruntime(result, tmp_path, inputs), in_torchscript(result, inputs)):
        assert sqnr_db(wanted, found) > BOUND["fp16"]


def test_a_small_eps_is_told():
    _, _, report = converted(LayerNorm(1e-12), ("N", 16, 64))
    assert "its eps 1e-12 is 0 in fp16" in str(report.islands)
    _, _, report = converted(LayerNorm(1e-5), ("N", 16, 64))
    assert "its eps" not in str(report.islands)


class Wave(nn.Module):
    """[n, t] -> positions as angles, up to thousands: in bf16 257 and 258 are one number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 16)
        self.register_buffer("frequency", 1 / 10 ** torch.linspace(0, 3, 16))

    def forward(self, x):
        angle = torch.arange(3000, dtype=torch.float32)[:, None] * self.frequency
        return self.project(x) * angle.cos()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_positions_keep_fp32_until_they_are_waves(precision):
    float32, result, report = converted(Wave(), ("N", 3000, 16), precision=precision)
    inputs = float32.reference[0].inputs
    assert report.refused is None
    assert sqnr_db(graph.run(float32, inputs), graph.run(result, inputs)) > BOUND[precision] + 15


def test_values_that_leave_the_range_keep_fp32_until_they_fit_again(tmp_path):
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            return self.c((self.b(self.a(x) * 40) * 2000).relu() * 1e-4)

    float32, result, report = converted(Loud(), ("N", 16))
    inputs = float32.reference[0].inputs
    assert np.isinf(Loud().half()(torch.from_numpy(inputs["x0"]).half()).detach().numpy()).any()
    assert types_of(result)["linear"] == {"float16"}
    island = next(i for i in report.islands if "relu" in i["operators"])
    assert any("values reach" in why and "65504" in why for why in island["why"])
    wanted = graph.run(float32, inputs)
    for found in (graph.run(result, inputs), in_onnxruntime(result, tmp_path, inputs), in_torchscript(result, inputs)):
        assert sqnr_db(wanted, found) > BOUND["fp16"]


@pytest.mark.parametrize(("scale", "word"), [(1e6, "its values reach"), (1e-7, "its values, at most")])
def test_weights_that_do_not_fit_keep_fp32_and_are_named(scale, word):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fits, self.scaled = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
            self.scaled.weight.data *= scale

        def forward(self, x):
            return self.scaled(self.fits(x)) / scale

    float32, result, report = converted(Scaled(), ("N", 16))
    assert list(report.weights) == ["inner.scaled.weight"] and word in report.weights["inner.scaled.weight"]
    stored = {name: tensor.dtype for name, tensor in result.module.named_parameters()}
    assert stored["inner.scaled.weight"] == torch.float32
    assert stored["inner.fits.weight_fp16"] == torch.float16
    inputs = float32.reference[0].inputs
    assert sqnr_db(graph.run(float32, inputs), graph.run(result, inputs)) > BOUND["fp16"]


def test_calibration_data_shows_ranges_that_the_reference_does_not():
    class Quiet(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.b((self.a(x) * 100).tanh())

    loud = {"x0": np.full((2, 16), 4000, np.float32)}
    _, without, _ = converted(Quiet(), ("N", 16))
    _, result, report = converted(Quiet(), ("N", 16), inputs=loud)
    assert types_of(without)["mul"] == {"float16"} and types_of(result)["mul"] == {"float32"}
    assert np.isfinite(graph.run(result, loud)["y0"]).all() and report.refused is None


def test_the_program_given_stays_as_it_was():
    float32, _, _ = converted(LayerNorm(1e-5), ("N", 16, 64))
    nodes, names = len(float32.module.graph.nodes), set(dict(float32.module.named_parameters()))
    half(float32, "bf16")
    assert len(float32.module.graph.nodes) == nodes and set(dict(float32.module.named_parameters())) == names
    assert all(p.dtype == torch.float32 for p in float32.module.parameters())
