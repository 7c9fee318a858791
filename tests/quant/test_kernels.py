"""Which kernels onnxruntime makes of every model of the quantizer's, and that training places the same pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.quant import convert
from tests.quant import models
from tests.quant.programs import (
    batches,
    kernels_of,
    names,
    outputs,
    program,
    quantization,
    sqnr_db,
    watched,
)


def quantized(model: nn.Module, *sizes: int, placement: str = "onnxruntime-x86"):
    p = program(model, *sizes)
    return p, *convert.from_batches(p, quantization(placement), batches(*sizes))


KERNELS = {
    "residual": (models.Net, (3, 16, 16), {"QLinearConv": 3, "QLinearAdd": 1, "QLinearAveragePool": 1, "QGemm": 1}),
    "padded": (models.Padded, (3, 16, 16), {"QLinearConv": 2}),
    "excited": (models.Excited, (3, 8, 8), {
        "QLinearConv": 4, "QLinearMul": 1, "QLinearSigmoid": 1, "QLinearAveragePool": 1,
    }),
    "upsampled": (models.Upsampled, (3, 8, 8), {"QLinearConv": 3, "QLinearConcat": 1, "Resize": 1}),
    "shuffled": (models.Shuffled, (3, 8, 8), {"QLinearConv": 3, "QLinearConcat": 1, "Split": 1}),
    "pooled": (models.Pooled, (3, 8, 8), {"QLinearConv": 2, "QLinearAveragePool": 2, "QGemm": 1}),
    "leaky": (models.Leaky, (3, 8, 8), {"QLinearConv": 2, "QLinearLeakyRelu": 1}),
    "tied": (models.Tied, (4, 8, 8), {"QLinearConv": 2}),
    "branches": (models.Branches, (3, 8, 8), {"QLinearConv": 3, "QLinearConcat": 1}),
}  # fmt: skip


@pytest.mark.parametrize("placement", ["onnxruntime-x86", "onnxruntime-arm"])
@pytest.mark.parametrize("make, sizes, wanted", KERNELS.values(), ids=KERNELS.keys())
def test_nothing_of_a_convolutional_net_stays_float_in_onnxruntime(make, sizes, wanted, placement, tmp_path):
    p, integer, report = quantized(make(), *sizes, placement=placement)
    kernels = kernels_of(integer, tmp_path)
    assert {op: kernels.integer.get(op) for op in wanted} == wanted
    assert not kernels.floats and not kernels.boundaries
    assert report.coverage == 1.0 and report.operator_coverage == 1.0
    x = batches(*sizes, seed=6)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25


@pytest.mark.parametrize("placement", ["onnxruntime-x86", "tensorrt"])
@pytest.mark.parametrize("make, sizes, wanted", KERNELS.values(), ids=KERNELS.keys())
def test_training_places_what_calibration_places(make, sizes, wanted, placement):
    p = program(make(), *sizes)
    data = batches(*sizes, count=8, size=16)
    trained, report = watched(p, quantization(placement), data)
    calibrated, other = convert.from_batches(p, quantization(placement), data)
    assert report.counts == other.counts
    assert names(trained) == names(calibrated)
    x = batches(*sizes, seed=6)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(trained, x)) > 20


def test_an_embedding_goes_through_training(tmp_path):
    p = program(models.TiedTokens(), 7, dtype="int64", values=(0, 19))
    data = [{"x": np.random.default_rng(k).integers(0, 20, (8, 7))} for k in range(8)]
    trained, report = watched(p, quantization(), data)
    assert report.counts["embedding"] == {"quantized": 1, "float": 0}
    assert [v.dtype for v in trained.module.state_dict().values() if v.shape == (20, 8)] == [torch.int8]
    assert sqnr_db(outputs(p, data[0]["x"]), outputs(trained, data[0]["x"])) > 20


FLOAT_PARTS = {
    "attention by hand": (models.Attention, (6, 16), 4, {"MatMul", "FusedMatMul", "Softmax"}),
    "attention": (models.Mixer, (6, 16), 4, {"MatMul", "FusedMatMul", "Softmax"}),
    "hardsigmoid": (lambda: models.Excited(nn.Hardsigmoid()), (3, 8, 8), 4, {"HardSigmoid"}),
    "hardswish": (lambda: models.Gated(nn.Hardswish()), (3, 8, 8), 2, {"HardSigmoid", "Mul"}),
}


@pytest.mark.parametrize("make, sizes, products, floats", FLOAT_PARTS.values(), ids=FLOAT_PARTS.keys())
def test_what_costs_more_as_integers_stays_one_float_part_and_is_named(make, sizes, products, floats, tmp_path):
    p, integer, report = quantized(make(), *sizes)
    kernels = kernels_of(integer, tmp_path)
    assert kernels.integer_products == products
    assert floats <= set(kernels.floats)
    assert any(floats & set(boundary.operators) for boundary in kernels.boundaries)
    x = batches(*sizes, seed=6)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25
