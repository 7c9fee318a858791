"""reoptimize: Q/DQ that says the same twice goes, what the quantizer decided stays."""

from __future__ import annotations

import dataclasses

import onnx
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401, I001  registers the operators
from torch import nn

from edgeopt.backends import onnx_export
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


def reoptimized(forward, *shape):
    torch.manual_seed(0)
    given = dataclasses.replace(program(Model(forward), ("N", *(shape or (3,)))), integer=True)
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


U = (0.02, 0, 0, 255, torch.uint8)  # 0 to 5.1
SIX = (6 / 255, 0, 0, 255, torch.uint8)


@pytest.mark.parametrize(
    "activation, parameters",
    [
        (torch.relu, U),
        (torch.relu, (0.02, -128, -128, 127, torch.int8)),
        (nn.functional.relu6, U),
        (nn.functional.relu6, SIX),
        (lambda x: x.clamp(0, 6), SIX),
        (lambda x: x.clamp(min=0), SIX),
        (lambda x: nn.functional.hardtanh(x, -1, 1), (1 / 128, 0, -128, 127, torch.int8)),
    ],
)
def test_an_activation_that_the_range_behind_it_bounds_already_goes(activation, parameters):
    found, records = reoptimized(lambda self, x: dq(q(activation(3 * self.linear(x)), parameters), parameters))
    assert records["absorb_activation"].changed == 1
    assert not any(word in target for target in found for word in ("relu", "clamp", "hardtanh"))


@pytest.mark.parametrize(
    "activation, parameters",
    [
        (torch.relu, A),
        (torch.relu, (0.02, 1, 0, 255, torch.uint8)),
        (nn.functional.relu6, (0.03, 0, 0, 255, torch.uint8)),
        (lambda x: x.clamp(0.5, 6), SIX),
        (lambda x: x.clamp(max=4), U),
    ],
)
def test_an_activation_that_cuts_what_the_range_holds_stays(activation, parameters):
    found, records = reoptimized(lambda self, x: dq(q(activation(3 * self.linear(x)), parameters), parameters))
    assert records["absorb_activation"].changed == 0 and records["absorb_activation"].declined


def test_an_activation_that_floats_read_too_stays():
    def forward(self, x):
        y = self.linear(x).relu()
        return dq(q(y, U), U) + y

    found, records = reoptimized(forward)
    assert records["absorb_activation"].changed == 0


COARSE = (0.04, 0, -128, 127, torch.int8)
FINE = (0.02, 0, -32768, 32767, torch.int16)


def test_a_second_pair_that_keeps_every_value_goes():
    """Each multiple of 0.04 is one of 0.02, and the wider type holds all of them."""
    found, records = reoptimized(lambda self, x: dq(q(dq(q(x, COARSE), COARSE), FINE), FINE).sin())
    assert records["requantize"].changed == 1
    assert (count(found, "quantize"), count(found, "dequantize")) == (1, 1)


@pytest.mark.parametrize(
    "second",
    [
        (0.02, 0, -128, 127, torch.int8),  # half of the range is cut off
        (0.03, 0, -32768, 32767, torch.int16),  # no multiple
        (0.08, 0, -32768, 32767, torch.int16),  # coarser: half of the values are rounded away
    ],
)
def test_a_second_pair_that_changes_values_stays(second):
    found, records = reoptimized(lambda self, x: dq(q(dq(q(x, COARSE), COARSE), second), second).sin())
    assert records["requantize"].changed == 0 and count(found, "quantize") == 2


MOVES = {
    "view": lambda x: x.view(x.shape[0], -1),
    "flatten": lambda x: x.flatten(1),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "pixel_shuffle": lambda x: nn.functional.pixel_shuffle(x, 2),
    "slice": lambda x: x[:, 1:3],
    "select": lambda x: x[:, 1],
    "amax": lambda x: x.amax((2, 3)),
    "max_pool2d": lambda x: nn.functional.max_pool2d(x, 3, 2, 1),
}


@pytest.mark.parametrize("parameters", [A, (0.02, 100, 0, 255, torch.uint8)])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_pairs_around_what_only_moves_values_vanish(move, parameters):
    found, records = reoptimized(
        lambda self, x: dq(q(move(dq(q(x, parameters), parameters)), parameters), parameters), 4, 6, 6
    )
    assert records["dequantize_later"].changed == 1 and records["requantize"].changed == 1
    assert (count(found, "quantize"), count(found, "dequantize")) == (1, 1)


def test_another_scale_behind_max_pooling_converts_fewer_values():
    def forward(self, x):
        return dq(q(nn.functional.max_pool2d(dq(q(x, A), A), 2), B), B)

    found, records = reoptimized(forward, 4, 6, 6)
    assert records["dequantize_later"].changed == 1
    names = [t.split(".")[1] for t in found]
    assert names == [
        "quantize_per_tensor", "max_pool2d", "dequantize_per_tensor", "quantize_per_tensor", "dequantize_per_tensor",
    ]  # fmt: skip


def test_a_dequantize_that_floats_need_before_a_view_stays_there():
    found, records = reoptimized(lambda self, x: dq(q(x, A), A).view(-1).sin())
    assert records["dequantize_later"].changed == 0


def test_a_dequantize_that_others_read_stays():
    def forward(self, x):
        x = dq(q(x, A), A)
        return dq(q(x.flatten(1), A), A), x.sin()

    found, records = reoptimized(forward, 4, 6, 6)
    assert records["dequantize_later"].changed == 0


class Table(nn.Module):
    def __init__(self, per_row: bool):
        super().__init__()
        self.per_row = per_row
        self.register_buffer("weight", torch.randint(-128, 128, (10, 4)).to(torch.int8))
        self.register_buffer("scale", torch.rand(10) / 50)
        self.register_buffer("zero", torch.zeros(10, dtype=torch.int64))

    def forward(self, x):
        if self.per_row:
            table = OPS.dequantize_per_channel(self.weight, self.scale, self.zero, 0, -128, 127, torch.int8)
        else:
            table = OPS.dequantize_per_tensor(self.weight, 0.02, 0, -128, 127, torch.int8)
        return nn.functional.embedding(x.abs() % 10, table)


@pytest.mark.parametrize("per_row", [True, False])
def test_a_table_is_looked_up_as_integers(per_row, tmp_path):
    torch.manual_seed(0)
    given = dataclasses.replace(program(Table(per_row), ("N", 5), dtype="int64"), integer=True)
    result, records = reoptimize(given, PROFILE, {})
    assert {r.name: r for r in records}["dequantize_later"].changed == 1
    assert_equal(result, given, atol=0)
    file = onnx_export.write(result, tmp_path, opset_max=17)
    nodes = onnx.load(tmp_path / file.name).graph.node
    whole = [n for n in nodes if n.op_type == "DequantizeLinear" and "weight" in n.input[0]]
    assert not whole and [n.op_type for n in nodes].count("Gather") == 1 + per_row
