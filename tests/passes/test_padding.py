"""Zero padding moves into the convolution that reads it, or stays with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.passes.support import assert_equal, optimized, program, targets


class Padded(nn.Module):
    def __init__(self, conv: nn.Module, amounts: tuple[int, ...], **how):
        super().__init__()
        self.conv, self.amounts, self.how = conv, amounts, how

    def forward(self, x):
        return self.conv(F.pad(x, self.amounts, **self.how))


MOVED = {
    "1d": (lambda: nn.Conv1d(2, 3, 3), (2, 2), ("N", 2, 7)),
    "2d": (lambda: nn.Conv2d(2, 3, 3), (1, 1, 2, 2), ("N", 2, 6, 5)),
    "2d on top of its own": (lambda: nn.Conv2d(2, 3, 3, padding=(2, 1)), (3, 3, 1, 1), ("N", 2, 6, 5)),
    "2d rows only": (lambda: nn.Conv2d(2, 3, 3), (0, 0, 1, 1), ("N", 2, 6, 5)),
    "2d columns only": (lambda: nn.Conv2d(2, 3, 3), (2, 2), ("N", 2, 6, 5)),
    "2d with channels named": (lambda: nn.Conv2d(2, 3, 3), (1, 1, 1, 1, 0, 0), ("N", 2, 6, 5)),
    "2d strided, dilated, depthwise": (
        lambda: nn.Conv2d(4, 4, 3, stride=2, dilation=2, groups=4, bias=False), (2, 2, 2, 2), ("N", 4, 9, 9),
    ),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (1, 1, 0, 0, 2, 2), ("N", 2, 3, 4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MOVED)
def test_moved_and_equal(kind):
    torch.manual_seed(0)
    conv, amounts, shape = MOVED[kind]
    given = program(Padded(conv(), amounts), shape)
    result, records = optimized(given)
    assert records["pad_conv"].changed == 1
    assert not any("pad" in target for target in targets(result))
    assert_equal(result, given)


KEPT = {
    "one side": ((0, 1, 0, 1), {}, "one side more"),
    "another value": ((1, 1, 1, 1), {"value": 1.0}, "pads with 1.0"),
    "reflect": ((1, 1, 1, 1), {"mode": "reflect"}, "pads with reflect"),
    "cropping": ((-1, -1, 0, 0), {}, "crops"),
    "channels": ((0, 0, 0, 0, 1, 1), {}, "batch or channels"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_kept_with_the_reason_and_equal(kind):
    torch.manual_seed(0)
    amounts, how, reason = KEPT[kind]
    given = program(Padded(nn.Conv2d(4 if kind == "channels" else 2, 3, 3), amounts, **how), ("N", 2, 6, 6))
    result, records = optimized(given)
    assert records["pad_conv"].changed == 0
    assert reason in records["pad_conv"].declined[0]
    assert_equal(result, given)


def test_a_pad_with_another_reader_stays_for_that_one():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x):
            y = F.pad(x, (1, 1, 1, 1))
            return self.conv(y), y * 2

    given = program(Two(), ("N", 2, 5, 5))
    result, records = optimized(given)
    assert records["pad_conv"].changed == 1
    assert sum("pad" in target for target in targets(result)) == 1
    assert_equal(result, given)


def test_switched_off_it_stays():
    given = program(Padded(nn.Conv2d(2, 3, 3), (1, 1, 1, 1)), ("N", 2, 6, 6))
    result, records = optimized(given, pad_conv=False)
    assert records["pad_conv"].status == "off"
    assert any("pad" in target for target in targets(result))
