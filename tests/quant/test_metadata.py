"""What the quantizer's rules read of a graph whose nodes lack metadata: sizes that vary stay expressions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeopt.program import graph
from edgeopt.quant.prepare import complete_metadata, prepare
from edgeopt.spec.manifest import Axis
from tests.quant.programs import names, program, quantization


class Pooled(nn.Module):
    """Pictures of any size, [n, 3, h, w] -> [n, 5]."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def lacking(p, which: str):
    """The program without the values of some nodes: those of one kind, one node, or all."""
    for node in p.module.graph.nodes:
        if which in ("all", node.op, node.name):
            node.meta.pop("val", None)
    return p


@pytest.mark.parametrize("which", ["all", "placeholder", "call_function", "get_attr", "relu", "conv2d"])
@pytest.mark.parametrize("varying", [2, None])
def test_a_size_is_fixed_only_where_it_is_in_the_signature(which, varying):
    p = program(Pooled(), 3, 12, 12, varying=varying)
    wanted = {n.name: n.meta["val"].shape for n in p.module.graph.nodes if n.op == "call_function"}
    module = graph.copied(lacking(p, which).module)
    complete_metadata(module, p)
    for node in module.graph.nodes:
        if node.name in wanted:
            fixed = [
                [s if isinstance(s, int) else None for s in sizes]
                for sizes in (node.meta["val"].shape, wanted[node.name])
            ]
            assert fixed[0] == fixed[1], node.name
    pooled = [
        name
        for name in names(p.after("x", module=prepare(p, quantization()).module))
        if "pool" in name or name == "mean"
    ]
    assert pooled == (["mean"] if varying else ["avg_pool2d"])


def test_the_example_size_is_not_taken_for_the_only_one():
    """The program's axis may be at its example size in every reference call."""
    p = lacking(program(Pooled(), 3, 12, 12, varying=2), "all")
    assert p.signature.axes["size"] == Axis(min=4, opt=12, max=64)
    made = prepare(p, quantization()).module
    for size in (4, 12, 30):
        assert made(torch.zeros(2, 3, size, 12))[0].shape == (2, 5)
