"""BatchNorm before a layer goes into it, where the layer's own zeros do not forbid it (case G02)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeopt.passes import optimize
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets
from tests.passes.test_batch_norm import BATCH_NORM, filled

BEFORE = {
    "conv1d": (lambda bias: nn.Conv1d(4, 6, 3, bias=bias), nn.BatchNorm1d(4), ("N", 4, 9)),
    "conv2d": (lambda bias: nn.Conv2d(4, 6, 3, bias=bias), nn.BatchNorm2d(4), ("N", 4, 6, 6)),
    "conv2d valid": (lambda bias: nn.Conv2d(4, 6, 3, padding="valid", bias=bias), nn.BatchNorm2d(4), ("N", 4, 6, 6)),
    "1x1 same": (lambda bias: nn.Conv2d(4, 6, 1, padding="same", bias=bias), nn.BatchNorm2d(4), ("N", 4, 6, 6)),
    "strided": (lambda bias: nn.Conv2d(4, 6, 3, stride=2, dilation=2, bias=bias), nn.BatchNorm2d(4), ("N", 4, 7, 7)),
    "conv3d": (lambda bias: nn.Conv3d(2, 6, 2, bias=bias), nn.BatchNorm3d(2), ("N", 2, 4, 4, 4)),
    "groups": (lambda bias: nn.Conv2d(4, 8, 3, groups=2, bias=bias), nn.BatchNorm2d(4), ("N", 4, 6, 6)),
    "depthwise": (lambda bias: nn.Conv2d(4, 8, 3, groups=4, bias=bias), nn.BatchNorm2d(4), ("N", 4, 6, 6)),
    "reflected": (
        lambda bias: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=bias), nn.BatchNorm2d(4),
        ("N", 4, 6, 6),
    ),
    "replicated": (
        lambda bias: nn.Conv1d(4, 6, 3, padding=1, padding_mode="replicate", bias=bias), nn.BatchNorm1d(4),
        ("N", 4, 6),
    ),
    "circular": (
        lambda bias: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", bias=bias), nn.BatchNorm2d(4),
        ("N", 4, 6, 6),
    ),
    "transposed 1x1": (lambda bias: nn.ConvTranspose2d(4, 6, 1, bias=bias), nn.BatchNorm2d(4), ("N", 4, 5, 5)),
    "transposed 1x1 groups": (
        lambda bias: nn.ConvTranspose2d(4, 6, 1, groups=2, bias=bias), nn.BatchNorm2d(4), ("N", 4, 5, 5),
    ),
    "linear": (lambda bias: nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(4), ("N", 4)),
    "flattened": (
        lambda bias: nn.Sequential(nn.Flatten(), nn.Linear(12, 6, bias=bias)), nn.BatchNorm1d(4), ("N", 4, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", BEFORE)
def test_before_a_layer_folded_and_equal(kind, bias):
    torch.manual_seed(0)
    layer, norm, shape = BEFORE[kind]
    given = program(nn.Sequential(filled(norm), layer(bias), nn.ReLU()), shape)
    result, records = optimized(given)
    assert records["bn_conv"].changed == 1 and BATCH_NORM not in targets(result)
    assert_equal(result, given, atol=1e-4)


def without_shift(norm: nn.Module) -> nn.Module:
    """A BatchNorm that only scales: a shift of its own that undoes that of the mean."""
    norm = filled(norm)
    norm.running_mean = torch.zeros_like(norm.running_mean)
    norm.bias.data.zero_()
    return norm


ONLY_SCALED = {
    "padded": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "same": lambda: nn.Conv2d(4, 6, 3, padding="same", groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "transposed groups": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
}


@pytest.mark.parametrize("kind", ONLY_SCALED)
def test_a_scale_alone_goes_into_a_layer_that_pads(kind):
    torch.manual_seed(0)
    given = program(nn.Sequential(without_shift(nn.BatchNorm2d(4)), ONLY_SCALED[kind]()), ("N", 4, 6, 6))
    result, records = optimized(given)
    assert records["bn_conv"].changed == 1
    assert_equal(result, given, atol=1e-4)


@pytest.mark.parametrize("kind", ONLY_SCALED)
def test_a_shift_before_a_layer_that_pads_stays(kind):
    torch.manual_seed(0)
    given = program(nn.Sequential(filled(nn.BatchNorm2d(4)), ONLY_SCALED[kind]()), ("N", 4, 6, 6))
    result, records = optimized(given)
    (reason,) = records["bn_conv"].declined
    assert records["bn_conv"].changed == 0 and ("pads with zeros" in reason or "different numbers of inputs" in reason)
    assert_equal(result, given)


class Chain(nn.Module):
    """`layers` in order, then what `last` makes of the result and of the tensor before each layer."""

    def __init__(self, *layers, last=lambda x, seen: x):
        super().__init__()
        self.layers, self.last = nn.ModuleList(layers), last

    def forward(self, x):
        seen = []
        for layer in self.layers:
            seen.append(x)
            x = layer(x)
        return self.last(x, seen)


class TwoReaders(nn.Module):
    def __init__(self, second):
        super().__init__()
        self.norm, self.a, self.b = filled(nn.BatchNorm2d(2)), nn.Conv2d(2, 3, 1), second

    def forward(self, x):
        y = self.norm(x)
        return self.a(y), self.b(y)


def tied(module: nn.Module) -> nn.Module:
    module.b.weight = module.a.weight
    return module


@pytest.mark.parametrize("module", [TwoReaders(nn.Conv2d(2, 5, 3)), tied(TwoReaders(nn.Conv2d(2, 3, 1)))])
def test_all_the_layers_that_read_it_take_it(module):
    torch.manual_seed(0)
    given = program(module, ("N", 2, 4, 4))
    result, records = optimized(given)
    assert records["bn_conv"].changed == 1 and BATCH_NORM not in targets(result)
    assert_equal(result, given, atol=1e-4)


CHAINS = {
    "conv bn bn": ((nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)), 2, 0),
    "bn bn conv": ((nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3)), 0, 2),
    "bn conv bn": ((nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), 1, 1),
    "bn conv bn conv": ((nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3)), 1, 1),
    "bn relu conv": ((nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 3)), 0, 0),
    "conv relu bn conv": ((nn.Conv2d(2, 3, 1), nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3)), 0, 1),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_chains(kind):
    torch.manual_seed(0)
    layers, after, before = CHAINS[kind]
    layers = [filled(layer, i) if "BatchNorm" in type(layer).__name__ else layer for i, layer in enumerate(layers)]
    given = program(nn.Sequential(*layers), ("N", 2, 7, 7))
    result, records = optimized(given)
    assert (records["conv_bn"].changed, records["bn_conv"].changed) == (after, before)
    assert_equal(result, given, atol=2e-4)


def strange(**values: float) -> nn.Module:
    norm = filled(nn.BatchNorm2d(2))
    for name, value in values.items():
        getattr(norm, name).data[0] = value
    return norm


@pytest.mark.parametrize("values", [{"weight": 0.0}, {"weight": -3.0}, {"running_var": 0.0, "weight": 1e-3}], ids=str)
@pytest.mark.parametrize("order", ["before", "after"])
def test_zero_negative_and_huge_scales(values, order):
    torch.manual_seed(0)
    norm, conv = strange(**values), nn.Conv2d(2, 2, 3)
    given = program(nn.Sequential(*((norm, conv) if order == "before" else (conv, norm))), ("N", 2, 5, 5))
    result, records = optimized(given)
    assert records["bn_conv" if order == "before" else "conv_bn"].changed == 1
    assert_equal(result, given, atol=1e-4)


@pytest.mark.parametrize("kind", ["weight", "running_var"])
def test_scales_beyond_float32_stay(kind):
    norm = strange(**{kind: 3e38 if kind == "weight" else -1.0})
    for layers in ((norm, nn.Conv2d(2, 2, 1)), (nn.Conv2d(2, 2, 1), norm)):
        layers[0 if layers[1] is norm else 1].weight.data.fill_(4.0)
        given = program(nn.Sequential(*layers), ("N", 2, 3, 3))
        _, records = optimized(given)
        assert records["bn_conv"].changed == records["conv_bn"].changed == 0
        assert any("not be finite" in r for r in (*records["bn_conv"].declined, *records["conv_bn"].declined))


BEFORE_KEPT = {
    "relu between": (nn.Sequential(filled(nn.BatchNorm2d(2)), nn.ReLU(), nn.Conv2d(2, 2, 1)), "but relu"),
    "output too": (
        Chain(filled(nn.BatchNorm2d(2)), nn.Conv2d(2, 2, 1), last=lambda x, seen: (x, seen[1])), "but output",
    ),
    "zeros padded": (
        nn.Sequential(filled(nn.BatchNorm2d(2)), nn.ZeroPad2d(1), nn.Conv2d(2, 2, 3)),
        "zeros are padded on before",
    ),
    "batch statistics": (
        nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.Conv2d(2, 2, 1)), "statistics of the batch",
    ),
    "linear over width": (nn.Sequential(filled(nn.BatchNorm2d(2)), nn.Linear(4, 2)), "no input channel"),
    "written to": (
        Chain(filled(nn.BatchNorm2d(2)), nn.Conv2d(2, 2, 1), last=lambda x, seen: (x, seen[1].view(-1).add_(1))),
        "writes to what it reads or gives",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BEFORE_KEPT)
def test_before_a_layer_kept_with_the_reason(kind):
    torch.manual_seed(0)
    module, reason = BEFORE_KEPT[kind]
    given = program(module, ("N", 2, 4, 4))
    result, records = optimized(given)
    assert records["bn_conv"].changed == 0 and reason in records["bn_conv"].declined[0]
    assert_equal(result, given)


def test_the_input_written_to_afterwards_is_read_as_it_was():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = filled(nn.BatchNorm2d(2)), nn.Conv2d(2, 2, 1)

        def forward(self, x):
            x = x * 1
            y = self.norm(x)
            x.view(-1).add_(1)
            return self.conv(y), x

    given = program(Model(), (2, 2, 4, 4))
    result, records = optimized(given)
    assert "writes to what it reads" in records["bn_conv"].declined[0]
    assert_equal(result, given)


@pytest.mark.parametrize("pattern", ["bn_conv", "bn_linear"])
def test_the_profile_decides_on_bn_before_a_layer(pattern):
    kept = tuple(p for p in PROFILE.fusion.patterns if p != pattern)
    profile = PROFILE.model_copy(update={"fusion": PROFILE.fusion.model_copy(update={"patterns": kept})})
    layers = (nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)) if pattern == "bn_conv" else (nn.BatchNorm1d(2), nn.Linear(2, 2))
    given = program(nn.Sequential(*layers), ("N", 2, 3, 3) if pattern == "bn_conv" else ("N", 2))
    record = next(r for r in optimize(given, profile, {})[1] if r.name == "bn_conv")
    assert record.changed == 0 and f"leave out {pattern}" in record.declined[0]
