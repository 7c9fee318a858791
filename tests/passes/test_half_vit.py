"""A vision transformer with the outliers that pre-trained ones have: plain fp16 collapses, mixed fp16 agrees.

Sun and others ("Massive Activations in Large Language Models", 2024) find in pre-trained ViTs a few activations of the
residual stream that are the same large number for every image, up to thousands of times the median.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgeopt.passes.half import half
from edgeopt.program import graph
from edgeopt.runtime.compare import top1_agreement
from edgeopt.spec.half_formats import FORMATS
from edgeopt.spec.manifest import Axis
from tests.passes.half_support import casts_of_casts, in_onnxruntime, in_torchscript, sqnr_db, stored_types, types_of
from tests.passes.support import optimized, program

WIDTH, CLASSES = 64, 10


class Block(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        self.fused = fused
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def attend(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = ((q @ k.transpose(-2, -1)) * (c // 4) ** -0.5).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(n, t, c))


class VisionTransformer(nn.Module):
    """[n, 3, 16, 16] -> [n, 10]. `outlier` and its negative are what the second block adds to two channels of the
    residual stream.

    The norms after it give the other channels their size back, as training does.
    """

    def __init__(self, outlier: float, *, fused: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.blocks[1].fc2.bias[7:9] = torch.tensor([outlier, -outlier])
            later = [norm for block in self.blocks[2:] for norm in (block.norm1, block.norm2)]
            for norm in (*later, self.norm):
                norm.weight *= outlier * (2 / WIDTH) ** 0.5
                norm.weight[7:9] = 0

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def images(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shades = rng.uniform(-2, 2, (count, 3, 1, 1))
    return {"x0": (shades + rng.normal(0, 0.5, (count, 3, 16, 16))).clip(-2, 2).astype(np.float32)}


@pytest.fixture(scope="module", params=[False, True], ids=["written out", "fused"])
def model(request):
    """(eager module, its optimized program, 64 images, the right answers)."""
    net = VisionTransformer(90_000.0, fused=request.param).eval()
    given = program(net, ("N", 3, 16, 16))
    wide = dataclasses.replace(given.signature, axes={"N": Axis(min=1, opt=3, max=64)})
    float32, _ = optimized(dataclasses.replace(given, signature=wide))
    inputs = images(64)
    with torch.no_grad():
        wanted = {"y0": net(torch.from_numpy(inputs["x0"])).numpy()}
    return net, float32, inputs, wanted


def test_the_model_is_worth_the_test(model):
    net, _, inputs, wanted = model
    assert len(set(wanted["y0"].argmax(1))) > 2  # it does not give every image one class
    with torch.no_grad():
        stream = net.blocks[1](net.blocks[0](net.patches(torch.from_numpy(inputs["x0"])).flatten(2).transpose(1, 2)))
    assert stream.abs().max() > 1000 * stream.abs().median()


def test_plain_fp16_collapses(model):
    net, _, inputs, wanted = model
    plain = VisionTransformer(90_000.0, fused=net.blocks[0].fused).eval().half()
    with torch.no_grad():
        found = plain(torch.from_numpy(inputs["x0"]).half()).float().numpy()
    assert np.isnan(found).all()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_agrees_with_fp32(model, precision, tmp_path):
    _, float32, inputs, wanted = model
    result, report = half(float32, precision, batches=[inputs])
    assert report.refused is None and report.searched == ()
    answers = {"torch": graph.run(result, inputs), "torchscript": in_torchscript(result, inputs)}
    if precision == "fp16":
        answers["onnxruntime"] = in_onnxruntime(result, tmp_path, inputs)
    for name, found in answers.items():
        assert sqnr_db(wanted, found) > FORMATS[precision].least_sqnr_db, name
        assert top1_agreement(wanted["y0"], found["y0"]) >= (0.99 if precision == "fp16" else 0.9), name


def test_the_products_are_in_fp16_and_the_stream_after_the_outlier_is_not(model, tmp_path):
    _, float32, inputs, _ = model
    result, report = half(float32, "fp16", batches=[inputs])
    types = types_of(result)
    assert types["conv2d"] == {"float16"} and types["layer_norm"] == {"float32"}
    wide = {path for island in report.islands for path in island["modules"]}
    assert "inner.blocks.1.fc2" in wide and list(report.weights) == ["inner.blocks.1.fc2.bias"]
    in_half = set(report.half_modules)
    assert {"inner.patches", "inner.blocks.0.fc1", "inner.blocks.3.fc2", "inner.head"} <= in_half
    assert casts_of_casts(result) == []
    assert report.bytes_after < 0.6 * report.bytes_before
    in_onnxruntime(result, tmp_path, inputs)
    stored = stored_types(tmp_path / "float16.onnx")
    assert stored["FLOAT16"] > 0.8 * (stored["FLOAT16"] + stored["FLOAT"])
