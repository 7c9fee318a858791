"""channels_last that survives a batch of one (case V03)."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from edgeopt.errors import StageError
from edgeopt.runtime import AdaptiveModel
from edgeopt.runtime.layout import channels_last, in_channels_last

Pair = namedtuple("Pair", "a b")


def batch(n: int, c: int, h: int, w: int) -> torch.Tensor:
    return torch.randn(n, c, h, w).contiguous(memory_format=torch.channels_last)


def strides(c: int, h: int, w: int) -> tuple[int, ...]:
    return (h * w * c, 1, w * c, c)


def test_the_fault_is_still_torchs():
    """What channels_last mends: where torch mends it itself this test says so."""
    one = batch(2, 3, 8, 8)[0].unsqueeze(0)
    assert one.is_contiguous(memory_format=torch.channels_last)
    assert not torch.nn.Conv2d(3, 4, 3)(one).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("c, h, w", [(3, 8, 8), (1, 8, 6), (3, 1, 7), (3, 7, 1), (4, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("take", ["slice", "contiguous", "narrowed"])
def test_any_image_gets_its_strides_and_keeps_its_values(n, c, h, w, take):
    x = {
        "slice": batch(n + 1, c, h, w)[:n],
        "contiguous": torch.randn(n, c, h, w),
        "narrowed": batch(n, c + 2, h, w)[:, 1 : c + 1],
    }[take]
    found = channels_last(x)
    assert found.stride() == strides(c, h, w)
    assert torch.equal(found, x)


def test_what_lies_right_is_not_copied():
    one = batch(2, 3, 8, 8)[0].unsqueeze(0)
    assert channels_last(one).data_ptr() == one.data_ptr()


@pytest.mark.parametrize("channels", [1, 4])
def test_a_convolution_answers_a_batch_of_one_in_channels_last(channels):
    conv = torch.nn.Conv2d(channels, 5, 3).eval()
    one = batch(2, channels, 8, 8)[0].unsqueeze(0)
    with torch.no_grad():
        found = in_channels_last(conv)(one)
        assert found.stride() == strides(5, 6, 6)
        torch.testing.assert_close(found, conv(one))


def test_structures_are_kept_and_what_is_no_image_is_left():
    def model(pair, images, *, mask):
        return {"pair": pair, "images": [x.relu() for x in images], "mask": mask}

    x, mask = torch.randn(1, 3, 4, 5), torch.ones(1, 2, 3, 4, dtype=torch.bool)
    found = in_channels_last(model)(Pair(x, "text"), [x], mask=mask)
    assert type(found["pair"]) is Pair and found["pair"].b == "text" and found["mask"] is mask
    assert found["pair"].a.stride() == found["images"][0].stride() == strides(3, 4, 5)


def test_an_output_in_another_layout_is_named():
    with pytest.raises(StageError, match=r"shape \(1, 3, 4, 5\) has the strides \(60, 20, 5, 1\)"):
        in_channels_last(lambda x: x.contiguous())(torch.randn(1, 3, 4, 5))


def test_an_entry_that_loses_the_layout_is_not_used():
    """The dynamic graph answers, and the statistics say why."""
    model = AdaptiveModel(lambda x: x + 1, lambda x: in_channels_last(lambda x: (x + 1).contiguous()))
    x = torch.randn(1, 3, 4, 5)
    assert torch.equal(model(x), x + 1)
    assert "is not channels_last" in model.statistics().reasons[0][1]


def test_sixteen_sizes_are_each_served_by_an_entry_of_its_own():
    """Case V01: a compiler that stops after 8 sizes would have run 8 of these without a word."""
    conv = torch.nn.Conv2d(3, 2, 3).eval()

    def build(x):
        with torch.no_grad():
            return in_channels_last(torch.jit.freeze(torch.jit.trace(conv, channels_last(x))))

    model = AdaptiveModel(conv, build, entries=16)
    with torch.no_grad():
        for size in list(range(8, 24)) * 2:
            x = torch.randn(1, 3, size, size + 1)
            torch.testing.assert_close(model(x), conv(x))
    done = model.statistics()
    assert (done.builds, done.hits, done.fallbacks, done.evictions) == (16, 32, 0, 0)


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
