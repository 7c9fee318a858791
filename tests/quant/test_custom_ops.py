"""Operators of the user's own in int8 and in training: left in float, and trained through with a gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.errors import StageError
from edgeopt.program import graph
from edgeopt.quant import convert, gradients
from edgeopt.spec.profile import load_profile
from tests.passes.support import program

PROFILE = load_profile("x86-cpu")


@torch.library.custom_op("quant_ops::gain", mutates_args=())
def gain(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return x * alpha


@torch.library.custom_op("quant_ops::plain", mutates_args=())
def plain(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return x * alpha


@torch.library.custom_op("quant_ops::places", mutates_args=())
def places(x: torch.Tensor) -> torch.Tensor:
    return x.argsort(dim=-1)


gain.register_fake(lambda x, alpha: torch.empty_like(x))
plain.register_fake(lambda x, alpha: torch.empty_like(x))
places.register_fake(lambda x: torch.empty_like(x, dtype=torch.int64))
gain.register_autograd(
    lambda ctx, grad: (grad * ctx.alpha, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "alpha", inputs[1]),
)
_library = torch.library.Library("quant_ops_old", "DEF")
_library.define("plain(Tensor x, float alpha) -> Tensor")
_library.impl("plain", lambda x, alpha: x * alpha, "CPU")
torch.library.register_fake("quant_ops_old::plain", lambda x, alpha: torch.empty_like(x), lib=_library)


class Net(nn.Module):
    """A layer, the operator, another layer."""

    def __init__(self, operator):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.operator = nn.Linear(4, 8), nn.Linear(8, 3), operator

    def forward(self, x):
        return self.second(self.operator(torch.relu(self.first(x))))


def test_the_operator_stays_float_between_two_integer_layers():
    given = program(Net(lambda x: gain(x, 2.0)), ("N", 4))
    batches = [graph.synthetic(given.signature, {"N": 8}, seed) for seed in range(4)]
    result, report = convert.from_batches(given, PROFILE.quantization, batches, limit=4)
    (node,) = [n for n in result.module.graph.nodes if n.target is torch.ops.quant_ops.gain.default]
    assert node.args[0].meta["val"].dtype == torch.float32
    assert sum("dequantize" in str(n.target) for n in result.module.graph.nodes) >= 2
    x = batches[0]
    wanted, found = graph.run(given, x)["y0"], graph.run(result, x)["y0"]
    assert 0 < np.abs(wanted - found).max() < 0.05 * np.abs(wanted).max()
    assert report is not None


def test_an_operator_with_a_gradient_may_be_trained_through():
    gradients.require(program(Net(lambda x: gain(x, 2.0)), ("N", 4)))


@pytest.mark.parametrize("namespace", ["quant_ops", "quant_ops_old"])
def test_one_without_is_refused_by_name_in_either_style(namespace):
    """torch says so at the first step for one style, and trains on with a warning for the other."""
    operator = getattr(torch.ops, namespace).plain
    with pytest.raises(StageError) as caught:
        gradients.require(program(Net(lambda x: operator(x, 2.0)), ("N", 4)))
    assert f"{namespace}::plain has no gradient" in caught.value.what
    assert "test_custom_ops.py, line" in caught.value.where and "register_autograd" in caught.value.todo


class OnInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(plain(x, 2.0)), places(self.layer(x))


def test_none_is_needed_before_the_weights_nor_for_integer_results():
    gradients.require(program(OnInputs(), ("N", 4)))
