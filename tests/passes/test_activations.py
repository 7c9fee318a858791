"""Activations written out by hand become the operators that they are; what is nearly one stays."""

from __future__ import annotations

import cProfile
import math
import pstats

import pytest
import torch
import torch.nn.functional as F

from edgeopt.passes import optimize
from edgeopt.passes.changed import Context
from edgeopt.passes.table import PASSES
from edgeopt.spec.profile import load_profile
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets
from tests.passes.test_identities import model

_2_PI = math.sqrt(2 / math.pi)
FORMS = {
    "gelu, as in BERT": (lambda s, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), "gelu"),
    "gelu, factors moved": (lambda s, x: x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476)), "gelu"),
    "gelu, the distribution first": (lambda s, x: x * (0.5 * (1.0 + torch.erf(x / 2**0.5))), "gelu"),
    "gelu, halved": (lambda s, x: x * (torch.erf(x / 1.4142135623730951) + 1) / 2, "gelu"),
    "gelu, multiplied out": (lambda s, x: 0.5 * (x + x * torch.erf(x * 0.70710678)), "gelu"),
    "gelu by erfc": (lambda s, x: 0.5 * x * torch.erfc(-x * math.sqrt(0.5)), "gelu"),
    "gelu with stored numbers": (lambda s, x: x * torch.mul(s.one / 2, 1 + torch.erf(x / torch.sqrt(s.two))), "gelu"),
    "tanh gelu, as in GPT": (
        lambda s, x: 0.5 * x * (1.0 + torch.tanh(_2_PI * (x + 0.044715 * torch.pow(x, 3.0)))), "gelu"),
    "tanh gelu, factored": (lambda s, x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))), "gelu"),
    "tanh gelu, a product": (lambda s, x: x * 0.5 * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))), "gelu"),
    "tanh gelu by sigmoid": (lambda s, x: x * torch.sigmoid(2 * _2_PI * (x + 0.044715 * x**3)), "gelu"),
    "silu": (lambda s, x: torch.sigmoid(x) * x, "silu"),
    "silu by exp": (lambda s, x: x / (1 + torch.exp(-x)), "silu"),
    "silu of a sum": (lambda s, x: (x * 2 + 1) * torch.sigmoid(x * 2 + 1), "silu"),
    "silu of a gate": (lambda s, x: x * torch.sigmoid(x) * torch.sin(x), "silu"),
    "hardswish by relu6": (lambda s, x: x * F.relu6(x + 3) / 6, "hardswish"),
    "hardswish by hardtanh": (lambda s, x: x * (F.hardtanh(x + 3.0, 0.0, 6.0) / 6.0), "hardswish"),
    "hardswish by clamp": (lambda s, x: x * torch.clamp(x / 6 + 0.5, 0, 1), "hardswish"),
    "hardswish by hardsigmoid": (lambda s, x: x * F.hardsigmoid(x), "hardswish"),
    "hardsigmoid": (lambda s, x: F.relu6(x + 3.0) / 6, "hardsigmoid"),
    "hardsigmoid by clamp": (lambda s, x: (torch.sin(x) / 6 + 0.5).clamp(0, 1), "hardsigmoid"),
    "mish": (lambda s, x: x * torch.tanh(F.softplus(x)), "mish"),
    "mish by log": (lambda s, x: x * torch.tanh(torch.log(1 + torch.exp(x))), "mish"),
    "mish by log1p": (lambda s, x: torch.tanh(torch.log1p(x.exp())) * x, "mish"),
    "softplus": (lambda s, x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())), "softplus"),
    "softplus turned": (lambda s, x: torch.log(1 + torch.exp(-torch.abs(x))) + F.relu(x), "softplus"),
}  # fmt: skip
NUMBERS = {"one": torch.tensor(1.0), "two": torch.tensor(2.0), "gain": torch.tensor([1.0, 2.0, 3.0, 4.0])}


def wide(work):
    """`work` on values of -8 to 8, where an activation bends."""
    return lambda self, x: work(self, 8 * torch.cos(x))


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_becomes_its_operator(kind):
    work, operator = FORMS[kind]
    given = program(model(wide(work), **NUMBERS), ("N", 4))
    result, records = optimized(given)
    assert f"aten.{operator}.default" in targets(result), records
    assert not any(f"aten.{part}.default" in targets(result) for part in ("erf", "erfc", "sigmoid", "tanh", "exp"))
    assert_equal(result, given, atol=3e-6)


MISSES = {
    "quick gelu": (lambda s, x: x * torch.sigmoid(1.702 * x), "constants"),
    "a short root": (lambda s, x: 0.5 * x * (1 + torch.erf(x / 1.41)), "constants"),
    "four digits": (lambda s, x: 0.5 * x * (1 + torch.erf(x * 0.7071)), "constants"),
    "without the half": (lambda s, x: x * (1 + torch.erf(x / math.sqrt(2))), "constants"),
    "another cubic": (lambda s, x: 0.5 * x * (1 + torch.tanh(_2_PI * (x + 0.0447 * x**3))), "constants"),
    "a seventh": (lambda s, x: x * F.relu6(x + 3) / 7, "constants"),
    "a part read elsewhere": (lambda s, x: (e := torch.sigmoid(x)) * x + torch.sin(e), "elsewhere"),
    "softplus that overflows": (lambda s, x: torch.log(1 + torch.exp(x)), "infinite"),
}
OTHERS = {
    "another x": lambda s, x: torch.sin(x) * torch.sigmoid(x),
    "minus": lambda s, x: x * (1 - torch.erf(x / math.sqrt(2))) * 0.5,
    "a gain for each channel": lambda s, x: 0.5 * x * (1 + torch.erf(x * s.gain)),
    "a square": lambda s, x: 0.5 * x * (1 + torch.tanh(_2_PI * (x + 0.044715 * x**2))),
    "other bounds": lambda s, x: x * torch.clamp(x + 3, 0, 5) / 6,
    "another softplus": lambda s, x: x * torch.tanh(F.softplus(x, beta=2.0)),
    "a rounded quotient": lambda s, x: torch.div(x * F.relu6(x + 3), 6, rounding_mode="floor"),
    "sigmoid squared": lambda s, x: x * torch.sigmoid(x) ** 2,
}


@pytest.mark.parametrize("kind", [*MISSES, *OTHERS])
def test_what_is_nearly_one_stays(kind):
    work, reason = MISSES[kind] if kind in MISSES else (OTHERS[kind], None)
    given = program(model(wide(work), **NUMBERS), ("N", 4))
    result, records = optimized(given)
    declined = records["gelu"].declined + records["silu"].declined
    assert records["gelu"].changed == records["silu"].changed == 0
    assert not reason or any(reason in why for why in declined), declined
    assert_equal(result, given, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_kept(dtype):
    def forward(self, x):
        y = (4 * x).to(dtype)
        return (y * torch.sigmoid(y)).float()

    given = program(model(forward), ("N", 4))
    result, records = optimized(given)
    assert records["silu"].changed == 1
    assert next(n for n in result.module.graph.nodes if "silu" in str(n.target)).meta["val"].dtype == dtype
    assert_equal(result, given, atol=0.05 if dtype != torch.float64 else 1e-6)


def test_a_gate_that_broadcasts_is_no_silu():
    given = program(model(lambda s, x: (y := x.mean(1, keepdim=True)).expand(-1, 4) * torch.sigmoid(y)), ("N", 4))
    result, records = optimized(given)
    assert records["silu"].changed == 0
    assert_equal(result, given, atol=1e-6)


def test_memory_that_is_written_to_stays():
    def forward(self, x):
        y = torch.cos(x)
        gate = torch.sigmoid(y)
        y[0] = 2.0
        return y * gate

    given = program(model(forward), ("N", 4))
    result, records = optimized(given)
    assert records["silu"].changed == 0 and any("writes" in why for why in records["silu"].declined)
    assert_equal(result, given, atol=0)


def test_a_profile_leaves_patterns_out():
    given = program(model(lambda s, x: x * torch.sigmoid(x) + 0.5 * x * (1 + torch.erf(x / 2**0.5))), ("N", 4))
    fusion = PROFILE.fusion.model_copy(update={"patterns": ("silu",)})
    _, records = optimize(given, PROFILE.model_copy(update={"fusion": fusion}), {})
    by_name = {record.name: record for record in records}
    assert by_name["silu"].changed == 1
    assert "leave out gelu" in by_name["gelu"].declined[0]


@pytest.mark.parametrize(
    ("name", "work", "reason"),
    [
        ("xavier@4.6", FORMS["mish"][0], "torch 1.7, and mish came with 1.9"),
        ("xavier@4.6", FORMS["tanh gelu, as in GPT"][0], "approximate='tanh' came with 1.12"),
        ("xavier", FORMS["tanh gelu, as in GPT"][0], "torch 1.11, and gelu with approximate='tanh' came with 1.12"),
        ("xavier@4.6", FORMS["silu"][0], None),
        ("xavier", FORMS["mish"][0], None),
    ],
)
def test_a_targets_torch_is_not_given_what_it_lacks(name, work, reason):
    given = program(model(wide(work)), ("N", 4))
    result, records = optimize(given, load_profile(name), {})
    declined = [why for record in records if record.name in ("gelu", "silu") for why in record.declined]
    changed = sum(record.changed for record in records if record.name in ("gelu", "silu"))
    assert (changed == 0 and reason in declined[0]) if reason else changed == 1
    without_script = load_profile(name).model_copy(update={"backends": ("tensorrt",)})
    _, records = optimize(given, without_script, {})
    assert sum(record.changed for record in records if record.name in ("gelu", "silu")) == 1
    assert_equal(result, given, atol=3e-6)


def test_ten_times_the_arithmetic_is_ten_times_the_work():
    """No pass looks at a whole chain from each of its operators."""

    def calls(length):
        def forward(self, x):
            for _ in range(length):
                x = x * torch.sin(x) + x * 0.5
            return x

        module = program(model(forward), ("N", 4)).module
        profiler = cProfile.Profile()
        profiler.enable()
        for step in PASSES:
            if step.name in ("gelu", "silu", "layer_norm", "rms_norm", "attention", "identities", "inverse_pairs"):
                step.run(Context(module, PROFILE))
        profiler.disable()
        return sum(count for (file, _, _), (_, count, *_) in pstats.Stats(profiler).stats.items() if "edgeopt" in file)

    assert calls(200) < 12 * calls(20)
