"""LayerNorm and RMSNorm written out by hand become the operators; other normalisations stay."""

from __future__ import annotations

import pytest
import torch

from edgeopt.passes import optimize
from edgeopt.spec.profile import load_profile
from tests.passes.support import assert_equal, optimized, program, targets
from tests.passes.test_identities import model


def bert(s, x):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return s.gamma * ((x - mean) / torch.sqrt(variance + 1e-12)) + s.beta


def llama(s, x):
    kind = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return s.gamma * x.to(kind)


LAYER_NORMS = {
    "as in BERT": bert,
    "by var": lambda s, x: (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * s.gamma + s.beta
    ),
    "by correction and rsqrt": lambda s, x: (
        s.beta + (x - x.mean(-1, True)) * torch.rsqrt(torch.var(x, dim=-1, correction=0, keepdim=True) + 1e-5) * s.gamma
    ),
    "by powers": lambda s, x: (
        s.gamma * (x - x.mean((-1,), True)) / (((x - x.mean(-1, True)) ** 2).mean(-1, True) + 1e-5) ** 0.5
    ),
    "over two dimensions": lambda s, x: (
        (x - x.mean((1, 2), True)) * (x.var((-2, -1), False, True) + 1e-5).rsqrt() * s.gamma2 + s.beta2
    ),
    "without gamma": lambda s, x: (
        (x - x.mean(-1, True)) / ((x - x.mean(-1, True)).square().mean(-1, True) + 1e-5).sqrt()
    ),
    "gamma with axes of one": lambda s, x: (
        (d := x - x.mean(-1, True)) / ((d * d).mean(-1, True) + 1e-5).sqrt() * s.gamma[None, None]
    ),
}
RMS_NORMS = {
    "as in Llama": llama,
    "a quotient": lambda s, x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * (1 + s.gamma),
    "one over the root": lambda s, x: x * (1 / torch.sqrt(x.square().mean(-1, True) + 1e-5)),
    "by a power": lambda s, x: s.gamma * (x * torch.pow(x.pow(2).mean(-1, keepdim=True) + 1e-5, -0.5)),
    "over two dimensions": lambda s, x: x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-5) * s.gamma2,
}


def normed(forward, *shapes):
    torch.manual_seed(0)
    tensors = {"gamma": torch.rand(6), "beta": torch.rand(6), "gamma2": torch.rand(4, 6), "beta2": torch.rand(4, 6)}
    return program(model(forward, **tensors), *(shapes or (("N", 4, 6),)))


@pytest.mark.parametrize("kind", LAYER_NORMS)
def test_a_layer_norm_becomes_one_operator(kind):
    given = normed(LAYER_NORMS[kind])
    result, records = optimized(given)
    assert targets(result) == ["aten.layer_norm.default"], records["layer_norm"]
    assert_equal(result, given, atol=3e-6)


@pytest.mark.parametrize("kind", RMS_NORMS)
def test_an_rms_norm_becomes_one_operator(kind):
    given = normed(RMS_NORMS[kind])
    result, records = optimized(given)
    assert targets(result) == ["aten.rms_norm.default"], records["rms_norm"]
    assert_equal(result, given, atol=3e-6)


def test_the_casts_of_a_half_model_are_kept():
    given = normed(lambda s, x: llama(s, (100 * x).half()).float())
    result, records = optimized(given)
    assert records["rms_norm"].changed == 1
    norm = next(n for n in result.module.graph.nodes if "rms_norm" in str(n.target))
    assert norm.meta["val"].dtype == torch.float32
    assert_equal(result, given, atol=2e-3)


MISSES = {
    "one fewer": (
        lambda s, x: (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
        "one fewer",
    ),
    "eps outside": (
        lambda s, x: s.gamma * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-6) + s.beta,
        "outside the root",
    ),
    "eps outside the root of var": (
        lambda s, x: (x - x.mean(-1, True)) / (torch.sqrt(x.var(-1, False, True)) + 1e-6),
        "outside the root",
    ),
    "mean of squares less square of mean": (
        lambda s, x: (x - x.mean(-1, True)) / torch.sqrt((x * x).mean(-1, True) - x.mean(-1, True) ** 2 + 1e-5),
        "cancels",
    ),
    "channels first": (
        lambda s, x: (x - x.mean(1, True)) / torch.sqrt(x.var(1, False, True) + 1e-6),
        "over dimensions [1] of 3",
    ),
    "two different means": (
        lambda s, x: (x - x.mean(-1, True)) / torch.sqrt(x.var(1, False, True) + 1e-6),
        "other dimensions",
    ),
    "a mean read elsewhere": (
        lambda s, x: ((u := x.mean(-1, True)) * 1.5, (x - u) / torch.sqrt(x.var(-1, False, True) + 1e-6)),
        "used elsewhere",
    ),
    "rms over the batch": (
        lambda s, x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6),
        "over dimensions [0] of 3",
    ),
    "rms read elsewhere": (
        lambda s, x: x * (r := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) + torch.sin(r),
        "used elsewhere",
    ),
}
OTHERS = {
    "the sum of squares": lambda s, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    "no eps": lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "squares of something else": lambda s, x: x * torch.rsqrt(torch.sin(x).pow(2).mean(-1, keepdim=True) + 1e-6),
    "cubes": lambda s, x: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6),
    "a mean of something else": lambda s, x: (
        (x - torch.sin(x).mean(-1, True)) / torch.sqrt(x.var(-1, False, True) + 1e-6)
    ),
    "multiplied by the root": lambda s, x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("kind", [*MISSES, *OTHERS])
def test_what_is_nearly_a_norm_stays(kind):
    forward, reason = MISSES[kind] if kind in MISSES else (OTHERS[kind], None)
    given = normed(forward)
    result, records = optimized(given)
    declined = records["layer_norm"].declined + records["rms_norm"].declined
    assert records["layer_norm"].changed == records["rms_norm"].changed == 0
    assert not reason or any(reason in why for why in declined), declined
    assert_equal(result, given, atol=1e-6)


def test_a_gain_computed_for_each_sample_stays_outside():
    def forward(self, x, style):
        normal = (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, False, True) + 1e-5)
        return normal * style[:, None] + style[:, None]

    given = normed(forward, ("N", 4, 6), ("N", 6))
    result, _ = optimized(given)
    norm = next(n for n in result.module.graph.nodes if "layer_norm" in str(n.target))
    assert norm.args[2] is None and norm.args[3] is None
    assert targets(result)[-2:] == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert_equal(result, given, atol=3e-6)


def test_a_large_mean_is_no_reason_to_differ():
    given = normed(lambda s, x: bert(s, x + 100))
    result, records = optimized(given)
    assert records["layer_norm"].status == "applied"
    assert_equal(result, given, atol=1e-3)  # float32 holds 100 + x to 8e-6, of a deviation of about 1


@pytest.mark.parametrize(("name", "changed"), [("xavier", False), ("thor", True), ("x86-cpu", True)])
def test_rms_norm_is_written_where_the_targets_torch_has_it(name, changed):
    given = normed(llama)
    _, records = optimize(given, load_profile(name), {})
    record = next(record for record in records if record.name == "rms_norm")
    assert bool(record.changed) == changed
    assert changed or "torch 1.11, and rms_norm came with 2.4" in record.declined[0]
