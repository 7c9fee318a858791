"""The placement for OpenVINO: what its executed graph runs on integers, with no conversion that onnxruntime's costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeopt.backends import onnx_export, openvino_kernels
from edgeopt.quant import convert
from tests.quant import models
from tests.quant.programs import batches, names, outputs, program, quantization, sqnr_db, watched

SETTINGS = {"activations": "uint8-asymmetric", "weight_bits": 7}


class Between(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, between: nn.Module):
        super().__init__()
        self.first, self.between, self.second = nn.Conv2d(3, 16, 3), between, nn.Conv2d(16, 16, 3)

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class Upscaled(nn.Module):
    """A transposed convolution between two others, each with a ReLU."""

    def __init__(self):
        super().__init__()
        self.first, self.up = nn.Conv2d(3, 16, 3, padding=1), nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.last = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return self.last(torch.relu(self.up(torch.relu(self.first(x)))))


def lowered(model: nn.Module, sizes: tuple, placement: str, folder):
    settings = quantization(placement, **SETTINGS)
    p = program(model, *sizes)
    integer, report = convert.from_batches(p, settings, batches(*sizes))
    folder.mkdir()
    file = onnx_export.write(integer, folder, opset_max=18)
    return p, integer, report, openvino_kernels.kernels(folder / file.name)


MODELS = {
    "sigmoid": (lambda: Between(nn.Sigmoid()), {"Convolution": 2}),
    "transposed": (Upscaled, {"Convolution": 2, "Deconvolution": 1}),
    "upsampled": (models.Upsampled, {"Convolution": 3, "Interpolate": 1, "Concatenation": 1}),
    "excited": (models.Excited, {"Convolution": 4}),
}


@pytest.mark.parametrize("make, wanted", MODELS.values(), ids=MODELS)
def test_products_run_on_integers_with_fewer_conversions_than_onnxruntimes_pairs_cost(make, wanted, tmp_path):
    p, integer, _, found = lowered(make(), (3, 8, 8), "openvino", tmp_path / "own")
    assert {name: found.integer.get(name) for name in wanted} == wanted
    assert found.float_products == 0
    other = lowered(make(), (3, 8, 8), "onnxruntime-x86", tmp_path / "other")[3]
    assert sum(found.conversions.values()) < sum(other.conversions.values())
    assert found.integer_products >= other.integer_products
    x = batches(3, 8, 8, seed=6)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 30


@pytest.mark.parametrize("make", [models.Net, models.Padded, models.Pooled, Upscaled])
def test_training_places_what_calibration_places(make):
    sizes = (3, 16, 16)
    p, data = program(make(), *sizes), batches(*sizes, count=8, size=16)
    settings = quantization("openvino", **SETTINGS)
    trained, report = watched(p, settings, data)
    calibrated, other = convert.from_batches(p, settings, data)
    assert report.counts == other.counts and names(trained) == names(calibrated)


def test_what_no_integer_kernel_reads_is_not_made_an_integer():
    p = program(models.Net(), 3, 16, 16)
    integer, _ = convert.from_batches(p, quantization("openvino", **SETTINGS), batches(3, 16, 16))
    last = next(node for node in reversed(integer.module.graph.nodes) if node.op == "call_function")
    assert "dequantize" not in str(last.target)
    plain = program(Between(nn.Identity()), 3, 8, 8)
    integer, _ = convert.from_batches(plain, quantization("openvino", **SETTINGS), batches(3, 8, 8))
    assert sum("quantize_per_tensor" in str(n.target) for n in integer.module.graph.nodes) == 4  # two pairs
