"""Calibration as it runs: what it keeps in memory, what it checks, what it draws, and what it says of odd data."""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from edgeopt.errors import DataError
from edgeopt.program import batches as program_batches
from edgeopt.program.data import calibration_batches
from edgeopt.progress import Progress
from edgeopt.quant import convert
from edgeopt.quant.calibrate import calibrate
from edgeopt.quant.findings import range_warnings
from edgeopt.quant.prepare import prepare
from edgeopt.spec.project import project_for_model
from tests.quant import models
from tests.quant.programs import batches, program, quantization

RANGES = ("minmax", "moving-average", "percentile", "mse", "entropy")


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return program(models.Net(), 3, 16, 16)


def many(count: int, size: int = 8):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": rng.standard_normal((size, 3, 16, 16), dtype=np.float32)}


@pytest.mark.parametrize("ranges", ["moving-average", "percentile", "mse"])
def test_memory_does_not_grow_with_the_number_of_batches(net, ranges):
    """A batch is 25 KB and its activations about 200 KB: 200 of them kept would show."""
    prepared = prepare(net, quantization(ranges=ranges))
    process, seen = psutil.Process(), []

    def watched():
        for i, batch in enumerate(many(300)):
            if i in (100, 299):
                seen.append(process.memory_info().rss)
            yield batch

    calibrate(prepared, watched(), limit=300)
    assert seen[1] - seen[0] < 8 << 20


def test_what_calibration_hands_back_is_bounded(net):
    first = calibrate(prepare(net, quantization()), many(40, size=4), limit=40)
    assert sum(len(tensors[0]) for tensors in first) == 16


PROJECT = """
import random
import numpy as np
import torch

def shuffled():
    for k in range(3):
        x = np.random.rand(2, 3, 16, 16) + random.random() + torch.rand(1).item()
        yield {"x": x.astype(np.float32)}

def listed():
    return [{"x": np.full((2, 3, 16, 16), k, np.float32)} for k in range(5)]
"""


def project(folder, function: str, **overrides):
    (folder / "data.py").write_text(PROJECT)
    (folder / "model.py").write_text("")
    return project_for_model(
        "model.py:net", folder=folder,
        inputs={"x": {"shape": ["batch", 3, 16, 16]}}, axes={"batch": {"min": 1, "opt": 2, "max": 64}},
        overrides={"calibration": f"data.py:{function}", **overrides},
    )  # fmt: skip


def test_a_loader_that_draws_yields_the_same_batches_again_and_leaves_our_random_numbers_alone(tmp_path, net):
    given = project(tmp_path, "shuffled")
    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        np.random.seed(noise)  # noqa: NPY002
        mine = torch.rand(1).item()
        stream = calibration_batches(given, net.signature)
        first = next(stream)
        between = torch.rand(1).item()
        runs.append([first, *stream])
        torch.manual_seed(noise)
        assert (mine, between) == (torch.rand(1).item(), torch.rand(1).item())
    assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(*runs, strict=True))
    other = list(calibration_batches(project(tmp_path, "shuffled", seed="1"), net.signature))
    assert not np.array_equal(other[0]["x"], runs[0][0]["x"])


def test_a_batch_is_checked_once(tmp_path, net, monkeypatch):
    checked = []
    check = program_batches._check_tensor
    monkeypatch.setattr(program_batches, "_check_tensor", lambda *args: checked.append(1) or check(*args))
    stream = calibration_batches(project(tmp_path, "listed"), net.signature)
    calibrate(prepare(net, quantization()), stream, limit=32)
    assert len(checked) == 5


def test_batches_checked_for_another_signature_are_checked_again(tmp_path, net):
    other = program(models.Gated(nn.ReLU()), 3, 8, 8)
    with pytest.raises(DataError, match="dimension 2 is 16 where 8"):
        calibrate(
            prepare(other, quantization()), calibration_batches(project(tmp_path, "listed"), net.signature), limit=2
        )


class Bars(Progress):
    """Notes what a bar is told."""

    def __init__(self):
        self.totals, self.done = {}, {}

    @contextlib.contextmanager
    def bar(self, label, total, *, unit=""):
        self.totals[label], self.done[label] = total, 0
        yield lambda amount: self.done.__setitem__(label, self.done[label] + amount)


@pytest.mark.parametrize("most, expected", [(32, 5), (3, 3)])
def test_the_bar_knows_how_many_batches_there_will_be(tmp_path, net, most, expected):
    bars = Bars()
    stream = calibration_batches(project(tmp_path, "listed", calibration_batches=str(most)), net.signature)
    calibrate(prepare(net, quantization()), stream, limit=most, progress=bars)
    assert bars.totals == bars.done == {"calibrating": expected}


@pytest.mark.parametrize("improve", [(), ("biases",), ("equalize", "rounding")])
def test_the_whole_quantization_knows_it_too_and_holds_batches_only_to_look_at_them_again(tmp_path, net, improve):
    bars, held = Bars(), []
    stream = calibration_batches(project(tmp_path, "listed"), net.signature)

    class Watched:
        def __length_hint__(self):
            return operator.length_hint(stream)

        def __iter__(self):
            for batch in stream:
                held.append(weakref.ref(next(iter(batch.values()))))
                if len(held) == 4:
                    alive.append(sum(ref() is not None for ref in held[:3]))
                yield batch

    alive = []
    convert.from_batches(net, quantization(improve=improve), Watched(), limit=32, progress=bars)
    assert bars.totals["calibrating"] == bars.done["calibrating"] == len(held) == 5
    assert alive == [3 if improve else 1]


def test_a_loader_that_ends_early_serves_and_very_few_samples_are_warned_about(net, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("edgeopt"), "propagate", True)
    convert.from_batches(net, quantization(), batches(3, 16, 16, count=2), limit=32)
    assert "samples only" not in caplog.text
    convert.from_batches(net, quantization(), batches(3, 16, 16, count=1, size=2), limit=32)
    assert "calibrated on 2 samples only" in caplog.text


@pytest.mark.parametrize("ranges", RANGES)
def test_batches_of_any_size_serve_and_their_order_changes_no_whole_range(net, ranges):
    """Sizes 1, 7 and 64; the moving average is the one method that weighs batches by their place."""
    data = [batches(3, 16, 16, count=1, size=size, seed=size)[0] for size in (1, 7, 64)]
    scales = []
    for order in (data, data[::-1]):
        prepared = prepare(net, quantization(ranges=ranges))
        calibrate(prepared, order, limit=3)
        observers = [m for m in prepared.module.children() if hasattr(m, "deviation")]
        scales.append([float(m.calculate_qparams()[0]) for m in observers])
    assert all(s > 0 for s in scales[0])
    if ranges != "moving-average":
        assert scales[0] == pytest.approx(scales[1], rel=1e-5)


class Odd(nn.Module):
    """A layer that gives 0 only, one whose channels are dead, one that saw its input once."""

    def __init__(self):
        super().__init__()
        self.silent, self.half_dead, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        with torch.no_grad():
            self.silent.weight.zero_(), self.silent.bias.fill_(-1)
            self.half_dead.weight[1:3].zero_()

    def forward(self, x):
        return self.last(torch.relu(self.silent(x)) + self.half_dead(x))


@pytest.mark.parametrize("ranges", RANGES)
def test_zero_ranges_are_reported_for_their_layer_and_harm_nothing(ranges):
    p = program(Odd(), 3, 8, 8)
    integer, report = convert.from_batches(p, quantization(ranges=ranges), batches(3, 8, 8))
    warnings = "\n".join(report.warnings)
    assert "model.silent: 4 of 4 channels are all zero" in warnings
    assert "model.half_dead: 2 of 4 channels are all zero" in warnings
    assert "constant at 0 over all calibration data" in warnings
    tensors = [*integer.module.parameters(), *integer.module.buffers()]
    assert all(bool(torch.isfinite(t.float()).all()) for t in tensors)


def test_channels_that_one_scale_rounds_away_are_reported():
    """Q01: 32 channels from 1 to a thousandth, one scale for all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(0, -3, 32).reshape(-1, 1, 1, 1))
    p = program(model, 32, 6, 6)
    prepared = prepare(p, quantization(per_channel=False))
    calibrate(prepared, batches(32, 6, 6), limit=4)
    weight = p.module.state_dict()["model.0.weight"].abs().flatten(1).amax(1)
    lost = int((weight < weight.max() / 63.5 / 2).sum())
    assert lost > 2
    line = (
        f"model.0: {lost} of 32 channels round to zero at one scale for all of them; set quantization.per_channel: on"
    )
    assert line in range_warnings(prepared.module)
    prepared = prepare(p, quantization())
    calibrate(prepared, batches(32, 6, 6), limit=4)
    assert range_warnings(prepared.module) == ()
