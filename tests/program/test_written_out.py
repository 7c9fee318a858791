"""Fused operators in ONNX files of each opset: no more nodes than by hand, and onnxruntime's kernels all the same."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.backends import onnx_export, torchscript
from edgeopt.program import ExportedGraph, graph, written_out
from tests.passes.support import optimized, program, targets

OPSETS = (20, 17, 13)
T = 5


class Hand(nn.Module):
    """[n, 5, 16] -> [n, 5, 16]: one block with everything written out that a pass fuses."""

    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)
        self.gamma, self.beta = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        y = self.gamma * ((x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)) + self.beta
        q, k, v = self.qkv(y).view(-1, T, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(8)).masked_fill(torch.ones(T, T).tril() == 0, -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, T, 16)
        y = self.up(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        gelu = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
        z = torch.sin(y)  # onnxruntime 1.32 breaks a graph in which both gelus share 0.5 y
        tanh = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        return x + self.down(gelu + y * torch.sigmoid(y) + y * F.relu6(y + 3) / 6 + tanh)


FUSED = {"layer_norm", "rms_norm", "scaled_dot_product_attention", "gelu", "silu", "hardswish"}


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    given = program(Hand(), ("N", T, 16))
    result, _ = optimized(given)
    assert {target.partition(".")[2].partition(".")[0] for target in targets(result)} >= FUSED
    assert "aten.erf.default" not in targets(result)
    return given, result


def written(what: ExportedGraph, folder, opset: int) -> tuple[onnxruntime.InferenceSession, Counter, Counter]:
    """A session of the program's file, the file's operators, and those that onnxruntime runs."""
    folder.mkdir()
    file = onnx_export.write(what, folder, opset_max=opset)
    assert file.opset == opset
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "run.onnx"), 3
    session = onnxruntime.InferenceSession(str(folder / file.name), options, providers=["CPUExecutionProvider"])
    counts = [
        Counter(node.op_type for node in onnx.load(folder / name).graph.node if node.op_type != "Constant")
        for name in (file.name, "run.onnx")
    ]
    return session, *counts


@pytest.mark.parametrize("opset", OPSETS)
def test_what_was_fused_has_no_more_nodes_and_kernels_than_before(pair, tmp_path, opset):
    given, result = pair
    _, file, kernels = written(given, tmp_path / "given", opset)
    session, fused_file, fused_kernels = written(result, tmp_path / "fused", opset)
    assert fused_file.total() <= file.total()
    assert fused_kernels.total() <= kernels.total()
    assert fused_kernels["LayerNormalization"] == 1 and fused_kernels["Gelu"] >= 1
    assert fused_file["LayerNormalization"] == (opset >= 18)  # TensorRT 8.5 parses opset 17 and not this
    inputs = graph.synthetic(given.signature, {"N": 7}, seed=4)
    want = graph.run(given, inputs)
    np.testing.assert_allclose(session.run(["y0"], inputs)[0], want["y0"], atol=2e-5, rtol=1e-4)


def test_what_was_fused_is_torchscript_too(pair):
    given, result = pair
    script = torchscript.scripted(result.module)
    inputs = graph.synthetic(given.signature, {"N": 7}, seed=4)
    with torch.no_grad():
        got = script(*graph.to_tensors(given.signature, inputs))
    np.testing.assert_allclose(got[0].numpy(), graph.run(given, inputs)["y0"], atol=2e-5, rtol=1e-4)
    assert "scaled_dot_product_attention" in str(script.graph)


class Attends(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.given = given

    def forward(self, x, mask):
        mask = {"bool": mask > 0, "float": mask, "inf": torch.where(mask > 0, 0.0, -math.inf)}.get(self.given["mask"])
        y = F.scaled_dot_product_attention(
            x[..., :4], x[..., 4:8], x[..., 8:], mask,
            is_causal=self.given.get("is_causal", False), scale=self.given.get("scale"),
        )  # fmt: skip
        return y * 1.5


ATTENTION = {
    "plain": {"mask": None},
    "a scale": {"mask": None, "scale": 0.3},
    "causal": {"mask": None, "is_causal": True},
    "a boolean mask": {"mask": "bool"},
    "a mask of numbers": {"mask": "float"},
    "a mask of infinities": {"mask": "inf"},
}


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("length", [T, "N"])
def test_attention_of_any_kind_is_written_for_the_oldest_opset(tmp_path, kind, length):
    """Rows without any key are 0 as in torch, where softmax alone gives NaN; a causal flag needs no Trilu (14)."""
    given = program(Attends(**ATTENTION[kind]), (3, 2, length, 12), (length, length))
    session, file, _ = written(given, tmp_path / "onnx", 13)
    assert file["Reshape"] == 0 and file["MatMul"] == 2
    sizes = {"N": 7} if length == "N" else {}
    inputs = graph.synthetic(given.signature, sizes, seed=2)
    inputs["x1"][0] = -1.0  # the first query has no key
    want = graph.run(given, inputs)["y0"]
    used = {spec.name for spec in session.get_inputs()}
    got = session.run(["y0"], {name: value for name, value in inputs.items() if name in used})[0]
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-5)


def test_a_program_without_such_operators_is_handed_back():
    given = program(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), ("N", 3))
    assert written_out.for_onnx(given, 13) is given


def test_half_programs_keep_their_operators():
    given = program(nn.Sequential(nn.LayerNorm(4), nn.GELU()).half(), ("N", 4), dtype="float16")
    assert written_out.for_onnx(given, 13) is given


def test_the_program_given_is_left_as_it_was(pair):
    _, result = pair
    before = result.module.code
    names = [name for name, _ in result.module.named_buffers()]
    other = written_out.for_onnx(result, 13)
    assert other is not result and result.module.code == before
    assert [name for name, _ in result.module.named_buffers()] == names
    assert not {"aten.gelu.default", "aten.layer_norm.default"} - set(targets(result))
