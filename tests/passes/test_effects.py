"""Writes, random numbers and lazy tensors through the whole table: every operator that has an effect keeps it (G03)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.passes import run as runner
from edgeopt.passes.changed import Context
from edgeopt.passes.table import PASSES
from edgeopt.program import graph
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets
from tests.passes.test_simplify import model

WRITES = {
    "masked_fill_": lambda x, y: y.masked_fill_(x > 0, 9.0),
    "index_put_": lambda x, y: y.index_put_((torch.tensor([0, 1]),), torch.tensor(5.0)),
    "index_fill_": lambda x, y: y.index_fill_(1, torch.tensor([0, 2]), 4.0),
    "scatter_": lambda x, y: y.scatter_(1, torch.tensor([[1], [0], [2]]), 7.0),
    "scatter_add_": lambda x, y: y.scatter_add_(1, torch.tensor([[1], [0], [2]]), x[:, :1]),
    "setitem, steps": lambda x, y: y.__setitem__((slice(None, None, 2), slice(1, None)), x[::2, 1:] * 2),
    "setitem, mask": lambda x, y: y.__setitem__(x < 0, 0.0),
    "setitem, ellipsis": lambda x, y: y.__setitem__((..., 0), 1.0),
    "part of a split": lambda x, y: y.split([1, 2])[1].mul_(3),
    "unbound row": lambda x, y: y.unbind(0)[2].add_(x[0]),
    "transposed": lambda x, y: y.t().add_(1),
    "diagonal": lambda x, y: y.diagonal().fill_(0.5),
    "view of a view of a view": lambda x, y: y.view(-1)[1:].view(2, 4)[:, 1].unsqueeze(0).neg_(),
    "out= of a view": lambda x, y: torch.add(x[0], 1, out=y[1]),
    "out= into itself": lambda x, y: torch.mul(y, 2, out=y),
    "clamp_ then read": lambda x, y: y.copy_(y.clamp_(-0.5, 0.5) * 2),
    "zero_ of a narrow": lambda x, y: y.narrow(1, 1, 2).zero_(),
    "leaky relu": lambda x, y: F.leaky_relu(y, 0.3, inplace=True),
    "hardtanh of a slice": lambda x, y: F.hardtanh(y[1:], inplace=True),
    "dropout off, in place": lambda x, y: F.dropout(y, 0.5, training=False, inplace=True).sub_(2),
    "swapped by copies": lambda x, y: (t := y[0].clone(), y[0].copy_(y[1]), y[1].copy_(t)),
    "squeeze_": lambda x, y: y.unsqueeze(0).squeeze_(0).mul_(2),
    "add_ of a larger expression": lambda x, y: y.add_(x.relu().mul_(2), alpha=0.5),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_whose_result_nobody_reads_is_kept(kind):
    def forward(self, x):
        y = x.clone()
        WRITES[kind](x, y)
        return y, x * 1

    given = program(model(forward), (3, 3))
    result, records = optimized(given)
    assert [r.name for r in records.values() if r.status == "dropped"] == []
    assert_equal(result, given, atol=0)


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_to_an_input_reaches_the_caller(kind):
    def forward(self, x):
        WRITES[kind](x * 1, x)
        return x + 1

    given = program(model(forward), (3, 3))
    result, _ = optimized(given)
    inputs = graph.synthetic(given.signature, {}, 4)
    before, after = (graph.to_tensors(given.signature, inputs) for _ in range(2))
    with torch.no_grad():
        want, got = given.module(*before), result.module(*after)
    for a, b in zip((*want, *before), (*got, *after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_buffer_that_is_written_to_is_neither_folded_nor_merged():
    """A count of calls: what reads the buffer before and after the write differs, in every call anew."""

    def forward(self, x):
        before = self.count * 2
        self.count.add_(1)
        return x + before, x + self.count * 2

    given = program(model(forward, count=torch.zeros(3)), ("N", 3))
    start = copy.deepcopy(given.module.state_dict())
    result, records = optimized(given)
    assert records["fold_constants"].changed == 0
    x = torch.ones(2, 3)
    runs = []
    for module in (given.module, result.module):
        module.load_state_dict({k: v.clone() for k, v in start.items() if k in module.state_dict()})
        runs.append([[y.clone() for y in module(x)] for _ in range(3)])
    for want, got in zip(*runs, strict=True):
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a.detach(), b.detach())
    assert [run[0][0, 0].item() - 1 for run in runs[0]] == [2, 4, 6]  # the capture itself has called it once


RANDOM = {
    "rand": lambda t: torch.rand(3), "randn": lambda t: torch.randn(3), "randint": lambda t: torch.randint(0, 9, (3,)),
    "randperm": lambda t: torch.randperm(3), "rand_like": lambda t: torch.rand_like(t),
    "bernoulli": lambda t: torch.bernoulli(t.sigmoid()), "normal": lambda t: torch.normal(t, 1.0),
    "multinomial": lambda t: torch.multinomial(t.abs() + 1, 3), "dropout": lambda t: F.dropout(t, 0.5, True),
}  # fmt: skip


@pytest.mark.parametrize("kind", RANDOM)
def test_random_numbers_are_drawn_in_every_call_and_apart(kind):
    def forward(self, x):
        return x + RANDOM[kind](self.t) * 0, x - RANDOM[kind](self.t) * 0

    given = program(model(forward, t=torch.randn(3)), ("N", 3))
    drawn = sum(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in given.module.graph.nodes)
    result, _ = optimized(given)
    left = sum(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in result.module.graph.nodes)
    assert drawn == left == 2


CONSTANT = {
    "complex": (torch.randn(3, dtype=torch.complex64), lambda t, x: torch.view_as_real(t.conj() * 2).sum(1) + x),
    "conjugate": (torch.randn(3, dtype=torch.complex64), lambda t, x: torch.view_as_real(t.conj() * x).sum(-1)),
    "number": (torch.tensor(2.5), lambda t, x: x * (t + 1)),
    "empty": (torch.zeros(0, 3), lambda t, x: torch.cat([t * 2, x])),
    "half": (torch.randn(3).half(), lambda t, x: x + (t * 2).float()),
    "double": (torch.randn(3).double(), lambda t, x: x + (t / 3)),
    "integers": (torch.arange(3), lambda t, x: x[:, (t + 1) % 3] // (t * 2 + 1)),
    "bool": (torch.tensor([True, False, True]), lambda t, x: torch.where(~t, x, -x)),
    "strided": (torch.randn(3, 6), lambda t, x: x @ t.t()[::2]),
    "negative bit": (torch.randn(3, dtype=torch.complex64), lambda t, x: t.conj().imag + x),
}


@pytest.mark.parametrize("kind", CONSTANT)
def test_constants_of_every_kind_are_folded_as_they_are(kind):
    value, work = CONSTANT[kind]
    given = program(model(lambda self, x: work(self.t, x), t=value), (2, 3))
    result, records = optimized(given)
    assert records["fold_constants"].changed > 0
    want, got = given.module(torch.ones(2, 3)), result.module(torch.ones(2, 3))
    assert want[0].dtype == got[0].dtype
    assert not any(t.is_conj() or t.is_neg() for t in result.module.buffers())
    assert_equal(result, given)


def test_equal_parts_of_equal_splits_are_one():
    def forward(self, x):
        return x.chunk(3, 1)[1] * 2 + x.chunk(3, 1)[1] * 2

    given = program(model(forward), ("N", 3))
    result, _ = optimized(given, identities=False, inverse_pairs=False)
    assert targets(result).count("aten.mul.Tensor") == 1
    assert_equal(result, given, atol=0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv, self.after = nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(8, 1))

    def forward(self, x):
        y = self.after(self.conv(self.norm(x))) * self.scale
        return torch.tanh(self.a(x) + self.b(y).relu_() + self.c(x))


def test_the_passes_of_layers_and_products_are_linear():
    """Ten times the blocks are no more than ten times the calls of Python functions."""
    import cProfile
    import pstats

    def calls(blocks):
        given = program(nn.Sequential(*[Block() for _ in range(blocks)]), ("N", 8, 4))
        profiler = cProfile.Profile()
        profiler.enable()
        _, records = optimized(given, aligned_channels=True, channels_last=True)
        profiler.disable()
        assert records["bn_conv"].changed == records["conv_bn"].changed == records["conv_affine"].changed == blocks
        assert records["sum_of_matmuls"].changed == blocks
        stats = pstats.Stats(profiler).stats
        return sum(count for (file, _, _), (_, count, *_) in stats.items() if "edgeopt" in file or "fx" in file)

    assert calls(40) < 11 * calls(4)


@pytest.mark.parametrize(("limit", "warned"), [(3, True), (10_000, False)])
def test_a_very_large_graph_is_warned_of(limit, warned, monkeypatch, caplog):
    monkeypatch.setattr(runner, "LARGE_GRAPH", limit)
    optimized(program(model(lambda self, x: x.sin().cos() + 1), ("N", 3)))
    assert any("nodes, as where a loop was unrolled" in r.getMessage() for r in caplog.records) is warned


def test_a_pass_that_changed_nothing_left_the_graph_as_it_was():
    """Its copy serves the next pass, which is sound only then; the runner looks at the number of nodes."""
    torch.manual_seed(0)
    given = program(nn.Sequential(Block(), nn.Flatten(1), nn.Linear(32, 3), nn.GELU()), ("N", 8, 4))
    given, _ = optimized(given)  # so that most passes have nothing left to do
    left_alone = []
    for step in PASSES:
        if step.graphs == "integer":
            continue
        copied = graph.copied(given.module)
        code, names, nodes = copied.code, list(copied.state_dict()), len(copied.graph.nodes)
        changed = step.run(Context(copied, PROFILE, dict(step.settings)))
        if not changed.count and len(copied.graph.nodes) == nodes:
            copied.recompile()
            assert copied.code == code and list(copied.state_dict()) == names, step.name
            left_alone.append(step.name)
    assert len(left_alone) > 10
