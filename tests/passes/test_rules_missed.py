"""A user's rule leaves alone what it does not say, and tells how near it came or what forbade it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.rules import Match, rule, tensor
from tests.passes.rules_support import (
    ATTENTION,
    FUSED,
    MERGED,
    NORM,
    SILU,
    Norm,
    Of,
    SelfAttention,
    applied,
    attention,
    finds,
    fused,
    misses,
    norm,
    silu,
)
from tests.passes.support import program


def test_the_nearest_miss_names_the_node_and_the_difference():
    said = misses(FUSED, SelfAttention(lambda scores: scores * 0.3), ("N", 5, 32))
    assert "nearest is matmul_1" in said and "5 of 5 operators of attention agree" in said
    assert "'other' is 3.33" in said and "the pattern's is 2.828" in said and "rules_support.py, line" in said
    said = misses(FUSED, SelfAttention(lambda scores: torch.tanh(scores)), ("N", 5, 32))
    assert "2 of 5 operators" in said and "it is aten.tanh, the pattern has aten.div by a number" in said
    said = misses(FUSED, SelfAttention(axis=-2), ("N", 5, 32))
    assert "'dim' is -2, the pattern's is -1" in said
    assert "the model has no aten.matmul" in misses(FUSED, nn.ReLU(), ("N", 4))


def test_axes_sizes_and_ranks_that_differ_are_no_match():
    said = misses(MERGED, Of(lambda x: torch.relu(x.transpose(1, 3).reshape(x.shape[0], 5, -1))), ("N", 4, 5, 6))
    assert "orders the axes as (0, 3, 2, 1), the pattern as (0, 2, 1, 3)" in said
    said = misses(MERGED, Of(lambda x: torch.relu(x.transpose(1, 2).reshape(x.shape[0], 6, 20))), ("N", 4, 5, 6))
    assert "its shape is [s" in said and "6, 20], the pattern's is [s" in said
    assert "'q' has 3 dimensions, the rule's 4" in misses(FUSED, Of(attention), *[("N", 5, 8)] * 3)
    said = misses(SILU_OF_4, Of(silu), ("N", 3))
    assert "'x' has the size 3 for the rule's 4" in said


SILU_OF_4 = rule(pattern=silu, replacement=lambda x: F.silu(x), inputs={"x": (..., 4)})


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_dtypes_that_differ_are_no_match(dtype):
    made = rule(
        pattern=lambda x: torch.relu(x * 2), replacement=lambda x: torch.clamp_min(x * 2, 0),
        inputs={"x": tensor(..., dtype=torch.float32)},
    )  # fmt: skip
    given = program(nn.Sequential(Of(lambda x: torch.relu(x * 2).float())), ("N", 4), dtype=dtype)
    _, record = applied(made, given)
    assert record.status == "nothing" and f"'x' is {dtype}, the rule takes float32" in record.declined[0]


class LeaksScores(SelfAttention):
    def forward(self, x):
        scores = x @ x.transpose(-2, -1) / math.sqrt(8)
        return torch.softmax(scores, -1) @ x, scores


class WritesToInput(nn.Module):
    def forward(self, x):
        x = x.clone()
        y = x[0]
        out = x * torch.sigmoid(x)
        y.add_(1)
        return out, x


def test_a_tensor_that_others_read_and_memory_that_is_written_to_stay():
    made = rule(
        pattern=attention, replacement=fused,
        inputs={k: ("batch", *v[2:]) for k, v in ATTENTION.items()},
    )  # fmt: skip
    said = misses(made, LeaksScores(), ("N", 5, 8))
    assert "the result of div is also read by output" in said
    assert "the model writes to the memory of" in misses(SILU, WritesToInput(), (3, 4))


class Late(nn.Module):
    """The second product reads what is computed from the first: one operator cannot give both."""

    def forward(self, x, a, b):
        first = x @ a
        return first, x @ (b + first.mean())


def test_outputs_that_depend_on_each_other_stay():
    made = rule(
        pattern=lambda x, a, b: (x @ a, x @ b), replacement=lambda x, a, b: (x @ b.mT.mT * 0 + x @ a, x @ b),
        inputs={"x": ("n", "c"), "a": ("c", "d"), "b": ("c", "d")},
    )  # fmt: skip
    said = misses(made, Late(), ("N", 3), (3, 4), (3, 4))
    assert "is computed after one of its results is read" in said


def test_the_check_sees_the_place_and_its_reason_is_recorded():
    seen: list[Match] = []

    def check(match: Match) -> str | None:
        seen.append(match)
        return "the head is wider than 4" if match["q"].shape[-1] > 4 else None

    made = rule(pattern=attention, replacement=fused, inputs=ATTENTION, check=check)
    given = program(nn.Sequential(SelfAttention()), ("N", 5, 32))
    _, record = applied(made, given)
    assert record.status == "nothing"
    assert record.declined[0].startswith("matmul_1 (") and "the head is wider than 4" in record.declined[0]
    q = seen[0]["q"]
    assert q.shape[1:] == (4, 5, 8) and isinstance(q.shape[0], str) and q.dtype is torch.float32
    assert q.largest == (8, 4, 5, 8) and q.smallest[0] in (1, 2)  # torch.export reads a size of 1 as 2
    assert [v.operator for v in seen[0].operators][-1] == "aten.matmul.default"
    softmax = seen[0].operators[3]
    assert softmax.operator == "aten.softmax.int" and softmax.arguments["dim"] == -1
    assert softmax.module == "inner.0" and seen[0].profile.name == "x86-cpu"


def test_the_check_sees_stored_tensors():
    def check(match: Match) -> str | None:
        return None if (match["weight"].constant > 0).all() else "a weight is not positive"

    made = rule(pattern=norm, replacement=NORM.replacement, inputs=dict(NORM.inputs), check=check)
    finds(made, Norm(1e-5), ("N", 5, 6))
    negative = Norm(1e-5)
    negative.weight.data[2] = -1
    assert "a weight is not positive" in misses(made, negative, ("N", 5, 6))
