"""A BatchNorm that graph passes have left: folded exactly into the layer before it, or kept with its constants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.program import graph
from edgeopt.quant import batch_norms, convert
from edgeopt.quant.prepare import prepare
from tests.quant.programs import batches, in_onnxruntime, outputs, program, quantization, sqnr_db, watched

EPS = 0.3  # far from torchao's 1e-5, so that taking the one for the other shows


def filled(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.01, 1.5)
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    return norm


class Followed(nn.Module):
    """A layer, its BatchNorm, an activation and a second layer."""

    def __init__(self, layer: nn.Module, norm: nn.Module, last: nn.Module):
        super().__init__()
        self.layer, self.norm, self.last = layer, filled(norm), last

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.layer(x))))


def norm2d(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=EPS, momentum=0.03)


MODELS = {
    "conv": (lambda: Followed(nn.Conv2d(3, 8, 3), norm2d(8), nn.Conv2d(8, 4, 1)), (3, 8, 8)),
    "conv without bias": (lambda: Followed(nn.Conv2d(3, 8, 3, bias=False), norm2d(8), nn.Conv2d(8, 4, 1)), (3, 8, 8)),
    "depthwise": (lambda: Followed(nn.Conv2d(4, 8, 3, groups=4), norm2d(8), nn.Conv2d(8, 4, 1)), (4, 8, 8)),
    "conv1d": (lambda: Followed(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8, EPS), nn.Conv1d(8, 4, 1)), (3, 8)),
    "conv3d": (lambda: Followed(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8, EPS), nn.Conv3d(8, 4, 1)), (3, 5, 5, 5)),
    "linear": (lambda: Followed(nn.Linear(6, 8), nn.BatchNorm1d(8, EPS), nn.Linear(8, 4)), (6,)),
    "transposed": (
        lambda: Followed(nn.ConvTranspose2d(4, 8, 2, groups=2), norm2d(8), nn.Conv2d(8, 4, 1)), (4, 6, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("make, sizes", MODELS.values(), ids=MODELS.keys())
def test_a_batch_norm_is_folded_exactly_with_its_own_eps(make, sizes):
    p = program(make(), *sizes)
    module = graph.copied(p.module)
    assert batch_norms.fold(module) == 1
    assert not any("batch_norm" in str(n.target) for n in module.graph.nodes)
    x = torch.from_numpy(batches(*sizes)[0]["x"])
    with torch.no_grad():
        torch.testing.assert_close(module(x)[0], p.module(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", ["onnxruntime-x86", "tensorrt"])
@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize("make, sizes", MODELS.values(), ids=MODELS.keys())
def test_a_batch_norm_left_in_the_graph_is_quantized_with_its_layer(make, sizes, qat, placement):
    """With passes.conv_bn off, QAT met a BatchNorm; its weight was then computed and its eps 1e-5 (Q09)."""
    p = program(make(), *sizes)
    integer, report = (watched if qat else calibrated)(p, quantization(placement), batches(*sizes, count=8))
    assert report.batch_norms_folded == 1
    assert not any("batch_norm" in str(n.target) for n in integer.module.graph.nodes)
    x = batches(*sizes)[0]["x"]  # the first batch, which the ranges of training follow
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25


calibrated = convert.from_batches


class Before(nn.Module):
    """A BatchNorm before its convolution, as pre-activation networks have it, and one whose convolution has others."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = filled(norm2d(4)), nn.Conv2d(4, 4, 3, padding=1)
        self.second, self.last = filled(norm2d(4)), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.conv(torch.relu(self.norm(x)))
        return x + self.last(torch.relu(self.second(x)))


@pytest.mark.parametrize("qat", [False, True])
def test_a_batch_norm_that_cannot_be_folded_keeps_its_constants(qat):
    """Q09: eps and momentum after the preparation and after the conversion are the model's."""
    p = program(Before(), 4, 6, 6)
    prepared = prepare(p, quantization(), qat=qat)
    integer, report = (watched if qat else calibrated)(p, quantization(), batches(4, 6, 6, count=8))
    assert report.batch_norms_folded == 0
    for module in (prepared.module, integer.module):
        norms = [n for n in module.graph.nodes if "batch_norm" in str(n.target)]
        assert [n.args[5:8] for n in norms] == [(False, 0.03, EPS)] * 2
    x = batches(4, 6, 6, seed=4)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25


def test_one_weight_with_a_batch_norm_after_each_use_gets_two():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.norms = nn.ModuleList(filled(norm2d(4)) for _ in range(2))

        def forward(self, x):
            return self.norms[1](self.conv(torch.relu(self.norms[0](self.conv(x)))))

    p = program(Shared(), 4, 8, 8)
    integer, report = convert.from_batches(p, quantization(), batches(4, 8, 8))
    assert report.batch_norms_folded == 2
    x = batches(4, 8, 8, seed=3)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25


def test_all_of_a_net_with_batch_norms_left_runs_on_integers(tmp_path):
    make, sizes = MODELS["conv"]
    integer, _ = convert.from_batches(program(make(), *sizes), quantization(), batches(*sizes))
    session, kernels = in_onnxruntime(integer, tmp_path)
    assert kernels["QLinearConv"] == 2 and not kernels["BatchNormalization"] and not kernels["Conv"]
    x = batches(*sizes, seed=2)[0]["x"]
    assert np.isfinite(session.run(None, {"x": x})[0]).all()
