"""The first node at which two graphs part: found in every place of a graph, and not where a rewrite is right."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.passes import Run, optimize
from edgeopt.passes.difference import first_difference
from edgeopt.program import graph
from edgeopt.program.intermediate import exposed, values
from edgeopt.spec.manifest import Tolerance
from tests.passes.support import PROFILE, program

WITHIN = Tolerance(max_abs=1e-3)
aten = torch.ops.aten


class Net(nn.Module):
    """Two conv-BN blocks, a residual and a head: every kind of operator that a pass here rewrites."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Dropout())
        self.head = nn.Linear(8, 5)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def net():
    return program(Net(), ("N", 3, 6, 6))


@pytest.fixture(scope="module")
def inputs(net):
    return net.reference[0].inputs


def _with(given, edit):
    module = graph.copied(given.module)
    edit(module)
    module.recompile()
    return dataclasses.replace(given, module=module)


def test_right_rewrites_are_no_difference(net, inputs):
    seen = {}
    optimize(net, PROFILE, {}, Run(watch=lambda name, program: seen.setdefault(name, program)))
    assert {"start", "out_of_place", "conv_bn"} <= set(seen)
    points = list(seen.values())
    for before, after in zip(points, points[1:], strict=False):
        assert first_difference(before, after, inputs, WITHIN) is None
    assert first_difference(points[0], points[-1], inputs, WITHIN) is None


@pytest.mark.parametrize("index", range(5))
def test_a_node_that_is_replaced_wrongly_is_found_by_its_place(net, inputs, index):
    """relu, sigmoid, add, mean and linear in turn are given a wrong twin of another name."""
    kinds = [aten.relu_.default, aten.sigmoid.default, aten.add.Tensor, aten.mean.dim, aten.linear.default]
    kind = kinds[index]

    def edit(module):
        node = next(n for n in module.graph.nodes if n.target is kind)
        with module.graph.inserting_after(node):
            wrong = module.graph.call_function(kind, node.args, node.kwargs)
        with module.graph.inserting_after(wrong):
            scaled = module.graph.call_function(aten.mul.Tensor, (wrong, 1.5))
        for new in (wrong, scaled):
            new.meta = dict(node.meta)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user not in (wrong, scaled))
        if kind is aten.relu_.default:
            scaled.args = (wrong, 1.5)
        module.graph.erase_node(node)

    found = first_difference(net, _with(net, edit), inputs, WITHIN)
    assert found is not None and found.operator == "aten.mul.Tensor"
    assert found.module == {0: "inner.stem.2", 1: "inner.block.2", 4: "inner.head"}.get(index, "inner")
    assert found.line == "support.py, line 50" or found.line.startswith("test_difference.py, line")
    assert found.error.max_rel == pytest.approx(0.5, rel=1e-4)
    assert found.found.high == pytest.approx(found.wanted.high * 1.5, rel=1e-4)
    assert found.found.shape == found.wanted.shape


def test_a_wrong_constant_is_found_at_the_node_that_reads_it(net, inputs):
    def edit(module):
        weight = module.get_parameter("inner.block.0.weight")
        module.get_submodule("inner.block.0").weight = nn.Parameter(weight.detach() * 1.01)

    found = first_difference(net, _with(net, edit), inputs, WITHIN)
    assert found.operator == "aten.conv2d" and found.module == "inner.block.0"
    assert [value.node for value in found.inputs]  # what it was given agrees: the fault is in the node itself
    for value in found.inputs:
        before = values(net, inputs, [value.node])[value.node]
        assert (value.low, value.high) == (pytest.approx(before.min()), pytest.approx(before.max()))


def test_a_tiny_value_in_the_middle_hides_no_fault(inputs):
    class Amplifies(nn.Module):
        def forward(self, x):
            return torch.tanh(x * 1e-7).sum((2, 3)) * 1e7

    given = program(Amplifies(), ("N", 3, 6, 6))

    def edit(module):
        node = next(n for n in module.graph.nodes if n.target is aten.tanh.default)
        node.target = aten.sin.default
        with module.graph.inserting_before(node):
            wrong = module.graph.call_function(aten.mul.Tensor, (node.args[0], 1.1))
        wrong.meta = dict(node.meta)
        node.args = (wrong,)

    found = first_difference(given, _with(given, edit), given.reference[0].inputs, WITHIN)
    assert found.wanted.high < 1e-6 and found.error.max_rel == pytest.approx(0.1, rel=1e-3)


def test_nan_in_one_of_the_two_is_a_difference(net, inputs):
    def edit(module):
        node = next(n for n in module.graph.nodes if n.target is aten.sigmoid.default)
        node.target = aten.log.default

    found = first_difference(net, _with(net, edit), inputs, WITHIN)
    assert found.error.max_abs == np.inf and found.operator == "aten.log"


def test_exposed_values_are_further_outputs_that_later_writes_do_not_change(net, inputs):
    nodes = [n for n in net.module.graph.nodes if n.target in (aten.batch_norm.default, aten.conv2d.default)]
    shown = exposed(net, nodes)
    out = graph.run(shown, inputs)
    own = graph.run(net, inputs)
    assert np.array_equal(out["y0"], own["y0"])
    known = values(net, inputs, [n.name for n in nodes])
    assert set(out) == {"y0", *(f"at_{n.name}" for n in nodes)} and len(nodes) == 4
    for node in nodes:  # relu_ writes to the first BatchNorm's result afterwards
        assert np.array_equal(out[f"at_{node.name}"], known[node.name])
    assert out["at_batch_norm"].min() < 0
    specs = {spec.name: spec for spec in shown.signature.outputs}
    assert specs["at_conv2d"].shape == ("N", 8, 6, 6)
