"""Attention written out by hand becomes one operator where that gives the same answer, masked rows included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.passes import optimize
from edgeopt.spec.profile import load_profile
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets
from tests.passes.test_identities import model

T, LEAST = 5, torch.finfo(torch.float32).min
OPERATOR = "aten.scaled_dot_product_attention.default"


def of(q, k, v, mask=lambda scores: scores, scale=0.5):
    return torch.softmax(mask(q @ k.transpose(-2, -1) * scale), -1) @ v


def triangle(kind=torch.bool):
    return torch.ones(T, T, dtype=kind).tril()


FORMS = {
    "scaled scores": lambda s, q, k, v: of(q, k, v),
    "scaled query": lambda s, q, k, v: torch.softmax((q * 0.5) @ k.mT, -1) @ v,
    "scaled both": lambda s, q, k, v: torch.softmax((q * 4**-0.25) @ (k * 4**-0.25).transpose(-1, -2), -1) @ v,
    "scaled transposed key": lambda s, q, k, v: torch.softmax(q @ (k.mT * 0.25), -1) @ v,
    "divided": lambda s, q, k, v: torch.softmax(q @ k.permute(0, 1, 3, 2) / math.sqrt(4), -1) @ v,
    "divided by a stored number": lambda s, q, k, v: torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(4.0)), -1) @ v,
    "not scaled": lambda s, q, k, v: torch.softmax(q @ k.mT, -1) @ v,
    "dropout that is off": lambda s, q, k, v: F.dropout(torch.softmax(q @ k.mT / 2, -1), 0.1, False) @ v,
    "einsum": lambda s, q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).mul(0.5).softmax(-1), v
    ),
    "einsum with an ellipsis": lambda s, q, k, v: torch.einsum(
        "... i j, ... j d -> ... i d", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v
    ),
    "a key that comes transposed": lambda s, q, k, v: (
        torch.softmax(q @ torch.sin(k.permute(0, 1, 3, 2)).reshape(-1, 2, 4, T) / 2, -1) @ v
    ),
    "causal, added": lambda s, q, k, v: of(q, k, v, lambda x: x + torch.full((T, T), -math.inf).triu(1)),
    "causal, as in GPT": lambda s, q, k, v: of(
        q, k, v, lambda x: x.masked_fill(s.bias[:, :, :T, :T] == 0, -math.inf)
    ),
    "causal, large number": lambda s, q, k, v: of(q, k, v, lambda x: x.masked_fill(~triangle(), -1e9)),
    "causal, where": lambda s, q, k, v: of(q, k, v, lambda x: torch.where(triangle(), x, torch.tensor(-1e9))),
    "masked, then scaled": lambda s, q, k, v: (
        torch.softmax((q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf) / 2, -1) @ v
    ),
    "relative positions": lambda s, q, k, v: of(
        q, k, v, lambda x: x + s.table[s.index.view(-1)].view(T, T, 2).permute(2, 0, 1).unsqueeze(0)
    ),
}  # fmt: skip
PADDED = {
    "as in BERT": lambda s, q, k, v, m: of(q, k, v, lambda x: x + (1.0 - (m > 0).float())[:, None, None] * LEAST),
    "a float mask as in BERT": lambda s, q, k, v, m: of(q, k, v, lambda x: x + (1.0 - m[:, None, None]) * -1e4),
    "as in DistilBERT": lambda s, q, k, v, m: of(
        q, k, v, lambda x: x.masked_fill((m < 0)[:, None, None].expand(-1, 2, T, T), torch.tensor(LEAST))
    ),
    "where, the least number": lambda s, q, k, v, m: of(
        q, k, v, lambda x: torch.where((m > 0)[:, None, None], x, LEAST)
    ),
}
MISSES = {
    "softmax over the queries": (lambda s, q, k, v: torch.softmax(q @ k.mT / 2, -2) @ v, "another dimension"),
    "a trained temperature": (lambda s, q, k, v: torch.softmax(q @ k.mT * s.temperature, -1) @ v, "by a tensor"),
    "weights that are returned": (lambda s, q, k, v: ((p := torch.softmax(q @ k.mT, -1)) @ v, p), "elsewhere"),
    "a mask that is scaled": (lambda s, q, k, v: torch.softmax((q @ k.mT + s.added) / 2, -1) @ v, "is scaled"),
    "two masks": (lambda s, q, k, v: of(q, k, v, lambda x: x + s.added + s.added2), "several masks"),
    "values that are transposed": (
        lambda s, q, k, v: torch.einsum("bhij,bhdj->bhid", torch.softmax(q @ k.mT, -1), v.mT), "transposed"),
    "a small number as a mask": (lambda s, q, k, v: of(q, k, v, lambda x: x.masked_fill(~triangle(), -1.0)), "-1.0"),
    "a row without keys": (
        lambda s, q, k, v: of(q, k, v, lambda x: x + torch.full((T, T), -math.inf).triu(0)), "no key"),
    "a negative scale": (lambda s, q, k, v: torch.softmax(q @ k.mT * -0.5, -1) @ v, "positive"),
    "a key that broadcasts": (lambda s, q, k, v: torch.softmax(q @ k[:, :1].mT, -1) @ v, "broadcast"),
    "softmax in double": (
        lambda s, q, k, v: torch.softmax(q @ k.mT, -1, dtype=torch.float64) @ v.double(), "computes in"),
}  # fmt: skip
PADDED_MISSES = {
    "a mask that multiplies": (
        lambda s, q, k, v, m: of(q, k, v, lambda x: x * m[:, None, None]), "by a tensor"),
    "a mask from outside": (lambda s, q, k, v, m: of(q, k, v, lambda x: x + m[:, None, None]), "no key"),
    "padding by -inf": (
        lambda s, q, k, v, m: of(q, k, v, lambda x: x.masked_fill((m < 0)[:, None, None], -math.inf)), "no key"),
    "padding by -1e9": (
        lambda s, q, k, v, m: of(q, k, v, lambda x: x.masked_fill((m < 0)[:, None, None], -1e9)), "no key"),
    "two masks added": (
        lambda s, q, k, v, m: of(
            q, k, v, lambda x: x + ((1 - m)[:, None, None] * LEAST + torch.full((T, T), LEAST).triu(1))), "no key"),
}  # fmt: skip


def attending(forward, *, padded: bool = False):
    torch.manual_seed(0)
    tensors = {
        "bias": torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8), "table": torch.randn(9, 2),
        "index": torch.randint(0, 9, (T, T)), "added": torch.randn(T, T), "added2": torch.randn(T, T),
        "temperature": nn.Parameter(torch.tensor([[[1.0]], [[2.0]]])),
    }  # fmt: skip

    def split(self, x, *mask):
        return forward(self, x[..., :4], x[..., 4:8], x[..., 8:], *mask)

    return program(model(split, **tensors), ("N", 2, T, 12), *([("N", T)] if padded else []))


@pytest.mark.parametrize("kind", [*FORMS, *PADDED])
def test_a_form_becomes_the_operator(kind):
    forward = (FORMS | PADDED)[kind]
    given = attending(forward, padded=kind in PADDED)
    result, records = optimized(given)
    assert OPERATOR in targets(result), records["attention"]
    assert not {"aten.softmax.int", "aten.matmul.default", "aten.einsum.default"} & set(targets(result))
    assert_equal(result, given, atol=3e-6)


@pytest.mark.parametrize("kind", ["as in BERT", "as in DistilBERT", "where, the least number"])
def test_a_sample_without_any_key_is_answered_as_before(kind):
    """Case P01: all keys masked by the least number are equal, and by -inf they are NaN."""
    given = attending(PADDED[kind], padded=True)
    result, records = optimized(given)
    x, mask = torch.randn(3, 2, T, 12), torch.tensor([[-1.0] * T, [1.0] * T, [-1.0, 1.0, 1.0, -1.0, -1.0]])
    with torch.no_grad():
        (want,), (got,) = given.module(x, mask), result.module(x, mask)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got[0], x[0, ..., 8:].mean(-2, keepdim=True).expand(-1, T, -1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [*MISSES, *PADDED_MISSES])
def test_what_is_nearly_attention_stays(kind):
    forward, reason = (MISSES | PADDED_MISSES)[kind]
    given = attending(forward, padded=kind in PADDED_MISSES)
    result, records = optimized(given)
    assert OPERATOR not in targets(result)
    assert any(reason in why for why in records["attention"].declined), records["attention"].declined
    if kind != "a row without keys":
        assert_equal(result, given, atol=1e-6)


class Heads(nn.Module):
    """[n, t, 16]: attention of two heads as `spelling` writes it, t dynamic or not."""

    def __init__(self, spelling):
        super().__init__()
        self.qkv, self.out, self.spelling = nn.Linear(16, 48), nn.Linear(16, 16), spelling

    def forward(self, x):
        n, t, width = x.shape
        if self.spelling == "timm":
            q, k, v = self.qkv(x).reshape(n, t, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            y = (q * 8**-0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
        elif self.spelling == "three dimensions":
            q, k, v = self.qkv(x).chunk(3, -1)
            y = torch.bmm(torch.baddbmm(x.new_zeros(n, t, t), q, k.mT, beta=0, alpha=0.25).softmax(-1), v)
            return self.out(y)
        else:
            q, k, v = (part.view(n, t, 2, 8).transpose(1, 2) for part in self.qkv(x).split(16, 2))
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
            y = (q @ k.mT / 8**0.5).masked_fill(~allowed, -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, width))


@pytest.mark.parametrize("spelling", ["timm", "three dimensions", "causal"])
def test_whole_modules_with_a_dynamic_length(spelling):
    torch.manual_seed(0)
    given = program(Heads(spelling), (2, "N", 16))
    result, records = optimized(given)
    assert targets(result).count(OPERATOR) == 1, records["attention"]
    assert_equal(result, given, atol=3e-6)


def test_torchs_own_module_with_its_weights_unread():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]  # the averaged weights are computed, and nothing reads them

    torch.manual_seed(0)
    given = program(Model(), ("N", T, 16))
    result, records = optimized(given)
    assert targets(result).count(OPERATOR) == 1, records["attention"]
    assert_equal(result, given, atol=3e-6)


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (load_profile("xavier"), "torch 1.11, and scaled_dot_product_attention came with 2.0"),
        (PROFILE.model_copy(update={"backends": ("onnxruntime",)}), "no backend of the profile has the operator"),
        (
            PROFILE.model_copy(update={"fusion": PROFILE.fusion.model_copy(update={"patterns": ()})}),
            "leave out attention",
        ),
    ],
)
def test_where_the_target_has_no_such_operator_it_stays_written_out(profile, reason):
    given = attending(FORMS["scaled scores"])
    result, records = optimize(given, profile, {})
    record = next(record for record in records if record.name == "attention")
    assert record.changed == 0 and reason in record.declined[0]
    assert_equal(result, given, atol=1e-6)


def test_memory_that_is_written_to_stays():
    def forward(self, q, k, v):
        scores = torch.softmax(q @ k.mT, -1)
        out = scores @ v
        scores[0] = 0.0
        return out, scores

    given = attending(forward)
    result, records = optimized(given)
    assert records["attention"].changed == 0
    assert_equal(result, given, atol=0)
