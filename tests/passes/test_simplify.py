"""No-ops, constants, duplicates and layout: simpler, equal, and never larger (cases G04, G08)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.support import assert_equal, optimized, program, targets


def model(forward, **buffers: torch.Tensor) -> nn.Module:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in buffers.items():
                self.register_buffer(name, value)

        def forward(self, *inputs):
            return forward(self, *inputs)

    return Model()


def size_bytes(result) -> int:
    tensors = [*result.module.parameters(), *result.module.buffers()]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize(
    "no_op",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: x.detach(),
        lambda x: x.to(torch.float32),
        lambda x: x.type_as(x),
        lambda x: x[:],
        lambda x: x.reshape(x.shape),
        lambda x: x.view(x.shape[0], 3),
        lambda x: x.expand(x.shape),
        lambda x: F.alpha_dropout(x, 0.5, training=False),
        lambda x: torch.feature_dropout(x, 0.5, False),
    ],
)
def test_a_no_op_goes(no_op):
    given = program(model(lambda self, x: no_op(x * 2) + 1), ("N", 3))
    result, _ = optimized(given)
    assert targets(result) == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert_equal(result, given, atol=0)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.to(torch.float64),
        lambda x: x[1:],
        lambda x: x[::2],
        lambda x: x[:, :2],
        lambda x: x.view(-1),
        lambda x: x[None].expand(4, -1, -1),
        lambda x: x.unsqueeze(0).squeeze(0).reshape(3, -1),
    ],
)
def test_what_does_something_stays(work):
    given = program(model(lambda self, x: work(x * 2)), (4, 3))
    result, records = optimized(given)
    assert len(targets(result)) >= 2
    assert_equal(result, given, atol=0)


def test_constants_are_computed_once():
    weight = torch.randn(4, 3)

    def forward(self, x):
        return x @ (self.w * 2 + 1).t() + torch.arange(4)

    given = program(model(forward, w=weight), ("N", 3))
    result, records = optimized(given)
    assert targets(result) == ["aten.matmul.default", "aten.add.Tensor"]
    assert records["fold_constants"].changed == 4
    assert all(t.is_contiguous() for t in result.module.buffers())
    assert_equal(result, given)


@pytest.mark.parametrize("copies", [False, True])
def test_folding_does_not_inflate(copies):
    def forward(self, x):
        big = self.small.expand(1, 64, 128, 128)
        return x + (big.contiguous() * 2 if copies else big)

    given = program(model(forward, small=torch.randn(1, 64, 1, 1)), (1, 64, 128, 128))
    result, records = optimized(given)
    assert size_bytes(result) <= 1024
    assert "would replace 256" in records["fold_constants"].declined[0]
    assert_equal(result, given)


def test_a_weight_that_is_used_as_it_is_too_is_not_stored_twice():
    table = torch.randn(1000, 16)

    def forward(self, x):
        return self.table[0] + x @ self.table.t() @ self.table

    given = program(model(forward, table=table), ("N", 16))
    result, _ = optimized(given)
    assert size_bytes(result) < table.nbytes * 1.1
    assert_equal(result, given, atol=1e-2)


def test_random_constants_are_not_frozen():
    given = program(model(lambda self, x: x + torch.rand(3) * 0), ("N", 3))
    result, _ = optimized(given)
    assert "aten.rand.default" in targets(result)


def test_equal_expressions_are_computed_once():
    given = program(model(lambda self, x: torch.sigmoid(x * 2) + torch.sigmoid(x * 2)), ("N", 3))
    result, records = optimized(given)
    assert records["duplicates"].changed == 2
    assert len(targets(result)) == 3
    assert_equal(result, given, atol=0)


def test_expressions_that_only_look_equal_stay():
    def forward(self, x):
        n = x.to(torch.int64)
        return n.add(1), n.add(1.0), n.add(True), x.sum(0), x.sum(1)

    given = program(model(forward), (3, 3))
    result, records = optimized(given)
    assert records["duplicates"].changed == 0
    assert_equal(result, given, atol=0)


def test_random_numbers_are_drawn_twice():
    given = program(model(lambda self, x: (x * 0 + torch.rand(3)) - torch.rand(3)), ("N", 3))
    result, _ = optimized(given)
    assert targets(result).count("aten.rand.default") == 2


@pytest.mark.parametrize(
    "weight",
    [torch.randn(32, 16, 1, 2)[:, :, :, ::2], torch.randn(32, 16, 1, 1).to(memory_format=torch.channels_last),
     torch.randn(16, 32, 1, 1).transpose(0, 1), torch.randn(99, 16, 1, 1)[:32]],
    ids=["strided", "channels last", "transposed", "part of a larger one"],
)  # fmt: skip
def test_weights_become_contiguous(weight):
    conv = nn.Conv2d(16, 32, 1, bias=False)
    conv.weight = nn.Parameter(weight)
    given = program(conv, (64, 16, 16, 16))
    result, _ = optimized(given)
    (held,) = result.module.parameters()
    assert held.is_contiguous() and held.untyped_storage().nbytes() == held.nbytes
    assert_equal(result, given)
