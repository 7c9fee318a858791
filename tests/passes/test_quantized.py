"""reoptimize: Q/DQ that says the same twice goes, what the quantizer decided stays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401, I001  registers the operators
from torch import nn

from edgeopt.passes import reoptimize
from tests.passes.support import PROFILE, assert_equal, program, targets

OPS = torch.ops.quantized_decomposed
A = (0.02, 3, -128, 127, torch.int8)
B = (0.03, 3, -128, 127, torch.int8)


def q(x, parameters):
    return OPS.quantize_per_tensor(x, *parameters)


def dq(x, parameters):
    return OPS.dequantize_per_tensor(x, *parameters)


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.run = forward
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor([0.01, 0.02, 0.03]))
        self.register_buffer("zero", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        return self.run(self, x)


def reoptimized(forward):
    torch.manual_seed(0)
    given = dataclasses.replace(program(Model(forward), ("N", 3)), integer=True)
    result, records = reoptimize(given, PROFILE, {})
    assert_equal(result, given, atol=0)
    assert result.integer
    return targets(result), {r.name: r for r in records}


def count(found: list[str], name: str) -> int:
    return sum(f"decomposed.{name}" in target for target in found)


def test_quantizing_again_with_equal_parameters_goes():
    found, records = reoptimized(lambda self, x: dq(q(dq(q(x, A), A), A), A).relu())
    assert records["requantize"].changed == 1
    assert (count(found, "quantize"), count(found, "dequantize")) == (1, 1)


@pytest.mark.parametrize(
    "other", [B, (0.02, 4, -128, 127, torch.int8), (0.02, 3, -127, 127, torch.int8), (0.02, 3, 0, 127, torch.uint8)]
)  # fmt: skip
def test_quantizing_again_with_other_parameters_stays(other):
    found, records = reoptimized(lambda self, x: dq(q(dq(q(x, A), A), other), other))
    assert records["requantize"].changed == 0 and records["requantize"].declined
    assert count(found, "quantize") == 2


def test_two_equal_quantizes_of_a_tensor_become_one_and_each_consumer_keeps_its_dequantize():
    found, _ = reoptimized(lambda self, x: dq(q(x, A), A).relu() + dq(q(x, A), A).sigmoid())
    assert (count(found, "quantize"), count(found, "dequantize")) == (1, 2)


def test_two_different_quantizes_of_a_tensor_stay():
    found, _ = reoptimized(lambda self, x: dq(q(x, A), A).relu() + dq(q(x, B), B).sigmoid())
    assert count(found, "quantize") == 2


def test_a_weight_is_stored_as_integers_and_its_dequantize_stays():
    channel = (0, -128, 127, torch.int8)

    def forward(self, x):
        w = OPS.quantize_per_channel(self.linear.weight, self.scale, self.zero, *channel)
        w = OPS.dequantize_per_channel(w, self.scale, self.zero, *channel)
        return nn.functional.linear(dq(q(x, A), A), w)

    found, records = reoptimized(forward)
    assert records["fold_constants"].changed == 1
    assert count(found, "quantize_per_channel") == 0 and count(found, "dequantize_per_channel") == 1


def test_float_passes_do_not_run():
    _, records = reoptimized(lambda self, x: dq(q(x, A), A))
    assert "conv_bn" not in records and "out_of_place" not in records
