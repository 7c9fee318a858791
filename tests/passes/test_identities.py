"""Arithmetic that does nothing goes, and what only looks like it stays."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.support import assert_equal, optimized, program, targets


def model(forward, **tensors: torch.Tensor) -> nn.Module:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in tensors.items():
                if isinstance(value, nn.Parameter):
                    self.register_parameter(name, value)
                else:
                    self.register_buffer(name, value)

        def forward(self, *inputs):
            return forward(self, *inputs)

    return Model()


def between(work):
    """`work` between two operators that stay."""
    return lambda self, x: torch.sin(work(self, torch.cos(x)))


GO = {
    "x * 1": lambda s, x: x * 1,
    "1 * x": lambda s, x: 1 * x,
    "x / 1": lambda s, x: x / 1.0,
    "x + 0": lambda s, x: x + 0,
    "0 + x": lambda s, x: 0.0 + x,
    "x - 0": lambda s, x: x - 0,
    "x ** 1": lambda s, x: x**1,
    "x * tensor(1)": lambda s, x: x * torch.tensor(1.0),
    "x + zeros": lambda s, x: x + torch.zeros(3),
    "x + zeros like": lambda s, x: x + torch.zeros_like(x),
    "x * a buffer of ones": lambda s, x: x * s.ones,
    "x + a float64 0": lambda s, x: x + s.zero64,
    "-(-x)": lambda s, x: x.neg().negative(),
    "-1 * -1": lambda s, x: x * -1 * -1,
    "abs of abs": lambda s, x: x.abs().absolute().abs() - x.abs(),
    "one tensor concatenated": lambda s, x: torch.cat([x], 1),
    "split into one": lambda s, x: x.split(3, 1)[0],
    "chunk into one": lambda s, x: x.chunk(1, 1)[0],
    "mean over one": lambda s, x: x.unsqueeze(1).mean(1),
    "sum over one, kept": lambda s, x: x[:, :1].sum(1, keepdim=True),
    "largest of one": lambda s, x: x[:, :, None].amax((-1,)),
    "not not": lambda s, x: (x > 0).logical_not().logical_not() * x,
}  # fmt: skip
TENSORS = {"ones": torch.ones(1, 3), "zero64": torch.zeros((), dtype=torch.float64)}


@pytest.mark.parametrize("kind", GO)
def test_what_does_nothing_goes(kind):
    given = program(model(between(GO[kind]), **TENSORS), ("N", 3))
    result, records = optimized(given)
    assert records["identities"].changed >= 1, records["identities"].declined
    assert len(targets(result)) < len(targets(given))
    assert_equal(result, given, atol=0)


CLAMPS = {
    "relu of relu": (lambda x: F.relu(F.relu(x)), ["relu"]),
    "relu of relu6": (lambda x: F.relu(F.relu6(x)), ["relu6"]),
    "relu6 of relu": (lambda x: F.relu6(F.relu(x)), ["relu6"]),
    "clamp of clamp": (lambda x: x.clamp(-1, 1).clamp(-0.5, 2), ["clamp"]),
    "min, then max": (lambda x: x.clamp(min=0).clamp(max=1), ["clamp"]),
    "hardtanh of clip": (lambda x: F.hardtanh(x.clip(-3, 3)), ["hardtanh"]),
    "apart": (lambda x: x.clamp(0, 1).clamp(2, 3), ["clamp"]),
    "three": (lambda x: F.relu(x).clamp(max=1).clamp(-1, 0.5), ["clamp"]),
}


@pytest.mark.parametrize("kind", CLAMPS)
def test_nested_bounds_become_one(kind):
    work, left = CLAMPS[kind]
    given = program(model(lambda self, x: work(x * 2)), ("N", 8))
    result, records = optimized(given)
    assert targets(result)[1:] == [f"aten.{name}.default" for name in left]
    assert_equal(result, given, atol=0)
    with torch.no_grad():
        special = torch.tensor([[math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1.0, 0.25]])
        assert torch.equal(torch.isnan(result.module(special)[0]), torch.isnan(given.module(special)[0]))
        torch.testing.assert_close(result.module(special)[0], given.module(special)[0], equal_nan=True, atol=0, rtol=0)


CHAINS = {
    "factors": (lambda x: x * 3.0 * 0.7, 1),
    "a factor and a divisor": (lambda x: x * 3.0 / 7.0, 1),
    "divisors": (lambda x: x / 3.0 / 7.0 / 2.0, 1),
    "terms": (lambda x: x + 1.5 + 2.25, 1),
    "differences": (lambda x: x - 1.5 - 2.25, 1),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_of_numbers_becomes_one(kind):
    work, left = CHAINS[kind]
    given = program(model(lambda self, x: torch.sin(work(torch.cos(x)))), ("N", 3))
    result, _ = optimized(given)
    assert len(targets(result)) == 2 + left
    assert_equal(result, given, atol=1e-6)


STAY = {
    "0 * x": (lambda s, x: x * 0, "NaN"),
    "terms that cancel": (lambda s, x: x + 1e8 - 1e8, "cancel"),
    "factors that overflow": (lambda s, x: x * 1e30 * 1e-30, "overflow"),
    "dtype by a tensor": (lambda s, x: x * torch.ones(1, dtype=torch.float64), "float64 of float32"),
    "dtype by a number": (lambda s, x: (x * 4).long() + 0.0, "float32 of int64"),
    "integers divided": (lambda s, x: (x * 4).long() / 1, "float32 of int64"),
    "broadcast by zeros": (lambda s, x: x + torch.zeros(2, 1, 1), "it makes (2,"),
    "broadcast by ones": (lambda s, x: x[:, :1] * torch.ones(4), "of ("),
    "a division after + 0": (lambda s, x: torch.reciprocal(x + 0), "-0"),
    "crossed bounds": (lambda s, x: x.clamp(1, -1).clamp(-2, 2), "crossed"),
    "a factor read twice": (lambda s, x: (y := x * 2) * 3 + y, "elsewhere"),
    "bounds read twice": (lambda s, x: (y := x.clamp(-1, 1)).clamp(-0.5, 2) + y, "elsewhere"),
    "half": (lambda s, x: (x.half() * 300 * 300).float(), "overflows"),
    "integers that wrap": (lambda s, x: (x * 4).to(torch.int8) * 100 * 3, "wrap"),
}


@pytest.mark.parametrize("kind", STAY)
def test_what_does_something_stays(kind):
    work, reason = STAY[kind]
    given = program(model(between(work)), ("N", 3))
    result, records = optimized(given)
    assert records["identities"].changed == 0
    assert any(reason in why for why in records["identities"].declined), records["identities"].declined
    assert_equal(result, given, atol=0)


SILENT = {
    "x - x": lambda s, x: x - x,
    "root of the square": lambda s, x: (x * x).sqrt(),
    "rounding division by 1": lambda s, x: torch.div(x, 1, rounding_mode="floor"),
    "minus of a difference": lambda s, x: -(1 - x),
    "two in a concatenation": lambda s, x: torch.cat([x, x], 0)[: x.shape[0]],
    "mean over two": lambda s, x: x[:, :2].mean(1),
    "not of a number": lambda s, x: x.logical_not().logical_not().float(),
}


@pytest.mark.parametrize("kind", SILENT)
def test_what_only_looks_alike_is_left_alone(kind):
    given = program(model(between(SILENT[kind])), ("N", 3))
    result, records = optimized(given)
    assert records["identities"].changed == 0
    assert_equal(result, given, atol=0)


def test_a_trained_scale_of_one_stays():
    given = program(model(between(lambda s, x: x * s.gamma), gamma=nn.Parameter(torch.ones(3))), ("N", 3))
    result, records = optimized(given)
    assert records["identities"].changed == 0
    assert "gamma" in dict(result.module.named_parameters()).popitem()[0]


def test_memory_that_is_written_to_stays_apart():
    def forward(self, x):
        y = torch.cos(x)
        z = y * 1
        z[0] += 1
        return y, z

    given = program(model(forward), ("N", 3))
    result, records = optimized(given)
    assert any("writes" in why for why in records["identities"].declined)
    assert_equal(result, given, atol=0)


def test_what_is_returned_is_not_the_callers_input():
    given = program(model(lambda self, x: (x * 1, x.neg().neg(), torch.cat([x]))), ("N", 3))
    result, records = optimized(given)
    assert [why.partition(": ")[2] for why in records["identities"].declined].count(
        "it is returned, and would be what the caller holds"
    ) == 3
    x = torch.ones(2, 3)
    with torch.no_grad():
        for value in result.module(x):
            value.add_(1)
    assert torch.equal(x, torch.ones(2, 3))


def test_a_reduction_over_a_dynamic_axis_stays():
    given = program(model(lambda self, x: torch.sin(torch.cos(x).mean(0, keepdim=True))), ("N", 3))
    result, records = optimized(given)
    assert records["identities"].changed == 0
    assert_equal(result, given, atol=1e-6)
