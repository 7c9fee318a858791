"""A user's rule finds what it says in whatever spelling, and what it puts in is right."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.passes.rules_trace import arguments
from edgeopt.rules import rule
from tests.passes.rules_support import (
    ATTENTION,
    FUSED,
    MERGED,
    NORM,
    SDPA,
    SILU,
    Norm,
    Of,
    SelfAttention,
    applied,
    attention,
    finds,
    fused,
    merged_heads,
    misses,
    silu,
)
from tests.passes.support import assert_equal, program, targets

ROWS = {  # attention as nn.MultiheadAttention writes it: heads among the batch
    "q": ("heads", "queries", "width"),
    "k": ("heads", "keys", "width"),
    "v": ("heads", "keys", "width"),
}


SPELLINGS = {
    "divided": SelfAttention(),
    "multiplied": SelfAttention(lambda scores: scores * 8**-0.5),
    "multiplied from the left": SelfAttention(lambda scores: 8**-0.5 * scores),
    "axis counted from the front": SelfAttention(axis=3),
    "a constant of few digits": SelfAttention(lambda scores: scores * 0.35355339),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("shape", [("N", 5, 32), (2, 5, 32)])
def test_attention_is_found_however_it_is_scaled(name, shape):
    result, _ = finds(FUSED, SPELLINGS[name], shape)
    assert targets(result).count(SDPA) == 1 and "aten.softmax.int" not in targets(result)


@pytest.mark.parametrize("transposed", [lambda k: k.transpose(2, 3), lambda k: k.permute(0, 1, 3, 2), lambda k: k.mT])
def test_axes_are_put_in_order_in_any_spelling(transposed):
    finds(FUSED, Of(lambda q, k, v: torch.softmax(q @ transposed(k) / math.sqrt(8), -1) @ v), *[("N", 2, 5, 8)] * 3)


@pytest.mark.parametrize("shape", [("N", 3), ("N", 2, 3, 4), (3,)])
@pytest.mark.parametrize("function", [silu, lambda x: torch.sigmoid(x) * x])
def test_operands_may_stand_the_other_way_round_on_any_number_of_dimensions(function, shape):
    finds(SILU, Of(function), shape)


def test_two_inputs_may_be_one_tensor():
    added = rule(
        pattern=lambda a, b: torch.relu(a + b), replacement=lambda a, b: torch.clamp_min(a + b, 0),
        inputs={"a": (...,), "b": (...,)},
    )  # fmt: skip
    finds(added, Of(lambda x: torch.relu(x + x)), ("N", 4))
    finds(FUSED, Of(lambda x: attention(x, x, x)), ("N", 2, 5, 8))


def test_an_assignment_that_fails_further_up_is_taken_back():
    """2a + 3b in 3x + 2y: the first way to put the operands is the wrong one."""
    made = rule(
        pattern=lambda a, b: a * 2.0 + b * 3.0, replacement=lambda a, b: torch.add(a * 2.0, b, alpha=3),
        inputs={"a": (...,), "b": (...,)},
    )  # fmt: skip
    finds(made, Of(lambda x, y: x * 3.0 + y * 2.0), ("N", 4), ("N", 4))


@pytest.mark.parametrize(
    "function",
    [
        merged_heads,
        lambda x: torch.relu(x.transpose(1, 2).flatten(2)),
        lambda x: torch.relu(x.transpose(1, 2).contiguous().view(x.shape[0], -1, 24)),
        lambda x: torch.relu(x.permute(0, 2, 1, 3).reshape(-1, 5, 24)),
    ],
)
@pytest.mark.parametrize("shape", [("N", 4, 5, 6), (2, 4, 5, 6)])
def test_sizes_that_follow_from_the_tensors_are_open_dynamic_or_not(function, shape):
    given = program(Of(function), shape)
    if "aten.contiguous.default" in targets(given):
        made = rule(
            pattern=lambda x: torch.relu(x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1)),
            replacement=MERGED.replacement, inputs={"x": ("b", "h", "t", "d")},
        )  # fmt: skip
        finds(made, Of(function), shape)
    else:
        finds(MERGED, Of(function), shape)


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 0.25])
def test_a_number_left_open_reaches_the_replacement_with_the_models_weights(eps):
    result, _ = finds(NORM, Norm(eps), ("N", 5, 6))
    node = next(n for n in result.module.graph.nodes if n.target is torch.ops.aten.layer_norm.default)
    given = dict(arguments(node))
    assert given["eps"] == eps and given["weight"].op == given["bias"].op == "get_attr"


def three(x, a, b, c):
    return x @ a, x @ b, x @ c


def one(x, a, b, c):
    n, m = a.shape[1], b.shape[1]
    y = x @ torch.cat([a, b, c], 1)
    return y[..., :n], y[..., n : n + m], y[..., n + m :]


THREE = rule(
    pattern=three, replacement=one,
    inputs={"x": ("b", "t", "c"), "a": ("c", "n"), "b": ("c", "m"), "c": ("c", "o")},
)  # fmt: skip


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6, n)) for n in (4, 4, 8))

    def forward(self, x):
        q = x @ self.a
        gate = torch.tanh(q)
        k, v = x @ self.b, x @ self.c
        return gate * k, v


def test_several_outputs_are_found_from_their_common_input():
    result, _ = finds(THREE, Three(), ("N", 5, 6))
    assert targets(result).count("aten.matmul.default") == 1


def test_a_constant_of_the_pattern_is_compared_and_one_of_the_replacement_is_stored():
    steps = torch.tensor([1.0, 2.0, 4.0])
    made = rule(
        pattern=lambda x: torch.relu(x * steps), replacement=lambda x: torch.relu(x) * steps, inputs={"x": (..., 3)}
    )

    class Holds(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.register_buffer("values", torch.tensor(values))

        def forward(self, x):
            return torch.relu(x * self.values)

    result, _ = finds(made, Holds([1.0, 2.0, 4.0]), ("N", 3))
    assert "rule_constant" in dict(result.module.named_buffers())
    assert "has other values" in misses(made, Holds([1.0, 2.0, 3.0]), ("N", 3))


@pytest.mark.parametrize(
    "written",
    [
        lambda x: torch.sigmoid(x).mul_(2).relu_(),
        lambda x: torch.relu(F.dropout(torch.sigmoid(x).float(), 0.5, training=False) * 2),
    ],
)
def test_in_place_operators_and_no_ops_of_a_pattern_go_as_those_of_a_model_do(written):
    made = rule(pattern=written, replacement=lambda x: torch.relu(torch.sigmoid(x) * 2), inputs={"x": (...,)})
    finds(made, Of(written), ("N", 4))
    finds(made, Of(lambda x: torch.relu(2 * torch.sigmoid(x))), ("N", 4))


def test_places_in_a_chain_are_all_replaced():
    finds(SILU, nn.Sequential(*(Of(silu) for _ in range(4))), ("N", 4), places=4)


@pytest.mark.parametrize("needed", [True, False])
def test_torchs_own_multihead_attention(needed):
    """With weights asked for it is written out, 3-d and scaled before; else it is torch's fused operator."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=needed)[0]

    def written(q, k, v):
        return torch.bmm(torch.softmax(torch.bmm(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1)), -1), v)

    made = {
        True: rule(pattern=written, replacement=fused, inputs=ROWS),
        False: rule(pattern=fused, replacement=attention, inputs=ATTENTION),
    }[needed]
    given = program(Model(), ("N", 5, 16))
    result, record = applied(made, given)
    assert record.status == "applied" and record.changed == 1, record
    assert_equal(result, given)
