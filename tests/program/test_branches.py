"""The longest chain, and what lies beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeopt.program.branches import branches
from edgeopt.program.walk import walk
from tests.passes.support import program
from tests.program import networks


def test_branches_are_found_with_their_operators():
    given = networks.branches()
    found = branches(walk(given, {"N": 1}))
    one, three, relu, join = 2 * 64 * 16, 2 * 64 * 16 * 9, 64 * 4, 2 * 64 * 12 * 4
    assert found.total_flops == one + 3 * three + relu + join
    assert found.critical_flops == 2 * three + relu + join
    assert found.times_faster == pytest.approx(found.total_flops / found.critical_flops)
    assert found.at_once == 3
    (region,) = found.regions
    assert region.at_once == 3
    assert {names for names, _ in region.branches} == {
        ("inner.left:conv2d",), ("inner.middle.0:conv2d",), ("inner.right:conv2d",),
    }  # fmt: skip
    assert found.critical == ("inner.middle.0:conv2d", "inner.middle.2:conv2d", "inner.join:conv2d")


def test_the_projections_of_attention_are_three_at_once():
    found = branches(walk(networks.block()))
    assert found.at_once == 3
    assert [names for names, _ in found.regions[0].branches] == [
        (f"inner.{name}:linear",) for name in "qkv"
    ]  # fmt: skip


def test_operators_of_one_branch_stay_together():
    class Net(nn.Module):
        """A branch of two small products beside one large: the small ones are one branch."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.large = nn.Linear(8, 80)

        def forward(self, x):
            return self.second(torch.relu(self.first(x))).sum() + self.large(x).sum()

    (region,) = branches(walk(program(Net(), ("N", 8)))).regions
    assert {names for names, _ in region.branches} == {
        ("inner.first:linear", "inner.second:linear"), ("inner.large:linear",),
    }  # fmt: skip
    assert region.at_once == 2
    assert region.saved_flops == 2 * 2 * 3 * 8 * 8


def test_a_chain_has_one_branch_and_nothing_to_win():
    found = branches(walk(networks.residual()))
    assert (found.at_once, found.regions) == (1, ())
    assert found.times_faster == pytest.approx(1.0, rel=0.01)  # the skip is no work


def test_an_in_place_write_orders_what_reads_the_memory_after_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fill, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            held = x.clone()
            half = held[:, :]  # a view
            held.add_(self.fill(x))
            return self.read(half)  # sees what was written

    found = branches(walk(program(Net(), ("N", 8))))
    assert found.at_once == 1
    assert found.critical == ("inner.fill:linear", "inner.read:linear")


def test_a_graph_without_operators_has_no_branches():
    found = branches(walk(program(nn.Identity(), ("N", 8))))
    assert (found.at_once, found.total_flops, found.times_faster) == (0, 0, 1.0)
