"""Operators of the user's own in the passes: moved, merged and folded where the schema allows it, else left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.passes.support import assert_equal, optimized, program, targets

_library = torch.library.Library("pass_ops", "DEF")


def _define(name: str, schema: str, function, fake, **keys) -> None:
    _library.define(f"{name}{schema}", **keys)
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"pass_ops::{name}", fake, lib=_library)


def _add(x, value):
    x.add_(value)


_define("pure", "(Tensor x, float a) -> Tensor", lambda x, a: x * a + 1, lambda x, a: torch.empty_like(x))
_define("write", "(Tensor(a!) x, float value) -> ()", _add, lambda x, value: None)
_define(
    "noisy", "(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x) * 1e-7, lambda x: torch.empty_like(x),
    tags=(torch.Tag.nondeterministic_seeded,),
)  # fmt: skip
_define(
    "several", "(Tensor[] xs) -> Tensor[]", lambda xs: [x + 1 for x in xs], lambda xs: [torch.empty_like(x) for x in xs]
)
OPS = torch.ops.pass_ops


class Twice(nn.Module):
    def forward(self, x):
        return OPS.pure(x, 2.0) + OPS.pure(x, 2.0) + OPS.pure(x, 3.0)


def test_equal_calls_of_a_pure_operator_become_one():
    given = program(Twice(), ("N", 4))
    result, _ = optimized(given)
    assert targets(result).count("pass_ops.pure.default") == 2
    assert_equal(result, given)


class Unread(nn.Module):
    def forward(self, x):
        OPS.pure(x, 2.0)
        return x + 1


def test_a_pure_operator_that_nobody_reads_goes():
    given = program(Unread(), ("N", 4))
    result, _ = optimized(given)
    assert "pass_ops.pure.default" not in targets(result)
    assert_equal(result, given)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * OPS.pure(self.weight, 2.0)


def test_a_pure_operator_of_a_stored_tensor_is_computed_now():
    given = program(Weighted(), ("N", 4))
    result, _ = optimized(given)
    assert "pass_ops.pure.default" not in targets(result)
    assert_equal(result, given)


class Written(nn.Module):
    """Reads before and after a write: what is written to must neither move nor merge."""

    def forward(self, x):
        y = x * 2
        before = OPS.pure(y, 2.0)
        OPS.write(y, 1.5)
        return before, OPS.pure(y, 2.0), y


def test_a_write_stays_where_it_is_though_nothing_reads_its_result():
    given = program(Written(), ("N", 4))
    result, records = optimized(given)
    assert targets(result).count("pass_ops.write.default") == 1
    assert targets(result).count("pass_ops.pure.default") == 2
    assert_equal(result, given)
    assert not [record.name for record in records.values() if record.status == "dropped"]


class WrittenView(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        half = y[:, :2]
        OPS.write(half, 1.5)
        return y + torch.relu(x)


def test_a_write_through_a_view_is_seen():
    given = program(WrittenView(), ("N", 4))
    result, _ = optimized(given)
    assert_equal(result, given)


class Noisy(nn.Module):
    def forward(self, x):
        return OPS.noisy(x), OPS.noisy(x)


def test_an_operator_that_draws_numbers_is_not_merged():
    result, _ = optimized(program(Noisy(), ("N", 4)))
    assert targets(result).count("pass_ops.noisy.default") == 2


class Listed(nn.Module):
    def forward(self, x):
        first, second = OPS.several([x, x * 2])
        return first + second


@pytest.mark.parametrize("module", [Twice, Weighted, Listed])
def test_results_keep_their_metadata(module):
    """The quantizer and lowering read shapes and dtypes from the nodes."""
    given = program(module(), ("N", 4))
    result, _ = optimized(given)
    assert all("val" in node.meta for node in result.module.graph.nodes if node.op == "call_function")
    assert_equal(result, given)
