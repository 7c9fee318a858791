"""Masks of attentions, whose constants fp16 or bf16 does not hold: a plain conversion gives NaN.

Each is compared with the fp32 model in torch, as an ONNX file in onnxruntime and as TorchScript.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgeopt.program import graph
from tests.passes.half_support import BOUND, TYPES, converted, in_onnxruntime, in_torchscript, sqnr_db, types_of


class Masked(nn.Module):
    """x [n, 2, 8], mask [n, 2] of 0 and 1 -> attention weights [n, 2, 2]; `value` is added where the mask is 0."""

    def __init__(self, value: float):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), value

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return (scores + (1 - mask[:, None, :]) * self.value).softmax(-1)


class Filled(Masked):
    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return scores.masked_fill(mask[:, None, :] < 0.5, self.value).softmax(-1)


class Attention(Masked):
    def forward(self, x, mask):
        added = ((1 - mask[:, None, :]) * self.value).expand(-1, 2, -1)
        return F.scaled_dot_product_attention(self.query(x), self.key(x), x, attn_mask=added)


LOWEST = float(torch.finfo(torch.float32).min)  # beyond bf16's range: it rounds to -inf there
MASKS = [(-1e9, "fp16"), (-1e5, "fp16"), (LOWEST, "fp16"), (LOWEST, "bf16")]


def masked(rows: list[list[float]]) -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(len(rows), 2, 8)).astype(np.float32)
    return {"x0": x, "x1": np.array(rows, np.float32)}


@pytest.mark.parametrize(("value", "precision"), MASKS)
@pytest.mark.parametrize("model", [Masked, Filled])
def test_a_row_that_is_masked_as_a_whole_is_even_and_not_nan(model, value, precision, tmp_path):
    inputs = masked([[1, 1], [1, 0], [0, 0]])
    naive = model(value).to({"fp16": torch.float16, "bf16": torch.bfloat16}[precision])
    with pytest.raises(RuntimeError, match="overflow") if model is Filled else _nan():  # what a plain conversion does
        given = [torch.from_numpy(v).to(naive.query.weight.dtype) for v in inputs.values()]
        assert bool(naive(*given).isnan().any())
        raise _Nan
    float32, result, report = converted(model(value), ("N", 2, 8), ("N", 2), precision=precision, inputs=inputs)
    assert report.refused is None and types_of(result)["linear"] == {str(naive.query.weight.dtype)[6:]}
    wanted = graph.run(float32, inputs)
    if value <= -1e9:  # so large that the scores are lost beside it
        np.testing.assert_array_equal(wanted["y0"][2], 0.5)
    answers = [graph.run(result, inputs), in_torchscript(result, inputs)]
    if precision == "fp16":
        answers.append(in_onnxruntime(result, tmp_path, inputs))
    for found in answers:
        np.testing.assert_allclose(found["y0"][2], wanted["y0"][2], atol=1e-3)
        assert sqnr_db(wanted, found) > BOUND[precision]


class _Nan(Exception):
    pass


def _nan():
    return pytest.raises(_Nan)


@pytest.mark.parametrize(("value", "precision"), MASKS)
def test_the_mask_of_an_attention_is_cut_to_the_range_where_no_row_is_empty(value, precision, tmp_path):
    inputs = masked([[1, 1], [1, 0], [0, 1]])
    float32, result, report = converted(
        _OpenRow(Attention(value)), ("N", 2, 8), ("N", 2), precision=precision, inputs=inputs
    )
    assert report.refused is None
    assert types_of(result)["scaled_dot_product_attention"] == {TYPES[precision]}
    answers = [graph.run(result, inputs), in_torchscript(result, inputs)]
    if precision == "fp16":
        answers.append(in_onnxruntime(result, tmp_path, inputs))
    for found in answers:
        assert sqnr_db(graph.run(float32, inputs), found) > BOUND[precision]


class _OpenRow(nn.Module):
    """The model with the first place never masked, as a sentence has at least one word."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.register_buffer("first", torch.tensor([1.0, 0.0]))

    def forward(self, x, mask):
        return self.inner(x, torch.maximum((mask > 0.5).float(), self.first))


def test_an_attention_with_an_empty_row_keeps_fp32_and_its_answer():
    inputs = masked([[1, 1], [0, 0]])
    float32, result, report = converted(Attention(-1e9), ("N", 2, 8), ("N", 2), inputs=inputs)
    assert types_of(result)["scaled_dot_product_attention"] == {"float32"}
    assert any("its constant -1e+09 is beyond fp16's 65504" in island["why"] for island in report.islands)
    found = graph.run(result, inputs)["y0"]
    np.testing.assert_allclose(found[1], np.broadcast_to(inputs["x0"][1].mean(0), (2, 8)), atol=2e-3)
