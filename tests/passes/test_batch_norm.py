"""BatchNorm folding is right for every kind of layer, or declined with the reason (cases G01, G02, G05)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.passes import optimize
from edgeopt.spec.profile import load_profile
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets

BATCH_NORM = "aten.batch_norm.default"


def filled(norm: nn.Module, seed: int = 0) -> nn.Module:
    """The BatchNorm with statistics and scales that matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in norm.named_parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator) + (2 if name == "weight" else 0)
    if norm.running_mean is not None:
        norm.running_mean = torch.randn(norm.running_mean.shape, generator=generator)
        norm.running_var = torch.rand(norm.running_var.shape, generator=generator) * 4 + 0.1
    return norm


LAYERS = {
    "conv1d": (lambda bias: nn.Conv1d(4, 6, 3, bias=bias), nn.BatchNorm1d(6), ("N", 4, 9)),
    "conv2d": (lambda bias: nn.Conv2d(4, 6, 3, padding=1, bias=bias), nn.BatchNorm2d(6), ("N", 4, 6, 6)),
    "conv2d same": (lambda bias: nn.Conv2d(4, 6, 3, padding="same", bias=bias), nn.BatchNorm2d(6), ("N", 4, 6, 6)),
    "conv3d": (lambda bias: nn.Conv3d(2, 6, 2, bias=bias), nn.BatchNorm3d(6), ("N", 2, 4, 4, 4)),
    "groups": (lambda bias: nn.Conv2d(4, 8, 3, groups=2, bias=bias), nn.BatchNorm2d(8), ("N", 4, 6, 6)),
    "depthwise": (lambda bias: nn.Conv2d(4, 4, 3, groups=4, bias=bias), nn.BatchNorm2d(4), ("N", 4, 6, 6)),
    "transposed1d": (lambda bias: nn.ConvTranspose1d(4, 6, 3, bias=bias), nn.BatchNorm1d(6), ("N", 4, 5)),
    "transposed2d": (lambda bias: nn.ConvTranspose2d(4, 6, 3, 2, bias=bias), nn.BatchNorm2d(6), ("N", 4, 5, 5)),
    "transposed3d": (lambda bias: nn.ConvTranspose3d(2, 6, 2, bias=bias), nn.BatchNorm3d(6), ("N", 2, 3, 3, 3)),
    "transposed groups": (
        lambda bias: nn.ConvTranspose2d(4, 6, 3, groups=2, bias=bias), nn.BatchNorm2d(6), ("N", 4, 5, 5),
    ),
    "linear": (lambda bias: nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6), ("N", 4)),
}  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_folded_and_equal(kind, bias):
    torch.manual_seed(0)
    layer, norm, shape = LAYERS[kind]
    given = program(nn.Sequential(layer(bias), filled(norm), nn.ReLU()), shape)
    result, records = optimized(given)
    assert records["conv_bn"].changed == 1
    assert BATCH_NORM not in targets(result)
    assert_equal(result, given)


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 0.1])
@pytest.mark.parametrize("affine", [True, False])
def test_eps_and_missing_scales_count(eps, affine):
    torch.manual_seed(0)
    norm = filled(nn.BatchNorm2d(6, eps=eps, affine=affine))
    norm.running_var = norm.running_var * 1e-3
    given = program(nn.Sequential(nn.Conv2d(4, 6, 1), norm), ("N", 4, 3, 3))
    result, records = optimized(given)
    assert records["conv_bn"].changed == 1
    assert_equal(result, given, atol=1e-4)


class Shared(nn.Module):
    """conv(x) + bn(conv(y)): the convolution's own weights must stay for its first use."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.norm.running_mean.fill_(0.5)
        self.norm.running_var.fill_(4.0)
        self.norm.weight.data.fill_(3.0)

    def forward(self, x, y):
        return self.conv(x) + self.norm(self.conv(y))


class SharedTwice(Shared):
    def __init__(self):
        super().__init__()
        self.other = filled(nn.BatchNorm2d(2))

    def forward(self, x, y):
        return self.other(self.conv(x)) + self.norm(self.conv(y))


@pytest.mark.parametrize(("model", "folded"), [(Shared, 1), (SharedTwice, 2)])
def test_a_shared_convolution(model, folded):
    torch.manual_seed(0)
    given = program(model(), ("N", 2, 3, 3), ("N", 2, 3, 3))
    result, records = optimized(given)
    assert records["conv_bn"].changed == folded
    assert_equal(result, given)


class Twice(nn.Module):
    """The convolution's result has a second user, so that it must stay as it is."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 1), filled(nn.BatchNorm2d(2))

    def forward(self, x):
        y = self.conv(x)
        return y + self.norm(y)


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = filled(nn.BatchNorm2d(2))

    def forward(self, x):
        return self.norm(nn.functional.conv2d(x, x[:1, :2, :1, :1].expand(2, 2, 1, 1)))


class Rows(nn.Module):
    """BatchNorm over axis 1 of a linear layer's (N, T, features): not the layer's outputs."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 5), filled(nn.BatchNorm1d(5))

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (Twice(), ("N", 2, 3, 3), "other users"),
        (Computed(), ("N", 2, 3, 3), "computed"),
        (Rows(), ("N", 5, 3), "axis 1 is not its output"),
        (
            nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)),
            ("N", 2, 3, 3),
            "statistics of the batch",
        ),
        (nn.Sequential(nn.ReLU(), filled(nn.BatchNorm2d(2))), ("N", 2, 3, 3), "no convolution"),
    ],
)
def test_declined_with_the_reason(module, shape, reason):
    given = program(module, shape)
    result, records = optimized(given)
    assert records["conv_bn"].changed == 0
    assert len(records["conv_bn"].declined) == 1 and reason in records["conv_bn"].declined[0]
    assert BATCH_NORM in targets(result)
    assert_equal(result, given)


def test_batch_norm_before_a_padded_convolution_stays_before_it():
    norm, conv = nn.BatchNorm2d(1), nn.Conv2d(1, 1, 3, padding=1, bias=False)
    norm.bias.data.fill_(1.0)
    conv.weight.data.fill_(1.0)
    given = program(nn.Sequential(norm, conv), (1, 1, 4, 4))
    result, _ = optimized(given)
    with torch.no_grad():
        got = result.module(torch.zeros(1, 1, 4, 4))[0].numpy()
    np.testing.assert_array_equal(got[0, 0, 0], [4, 6, 6, 4])
    np.testing.assert_array_equal(got[0, 0, 1:3, 1:3], 9)


def test_the_error_of_folding_is_reported_and_no_failure():
    torch.manual_seed(0)
    layers = [m for i in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), filled(nn.BatchNorm2d(8), i), nn.ReLU())]
    _, records = optimized(program(nn.Sequential(*layers), ("N", 8, 6, 6)))
    assert records["conv_bn"].status == "applied"
    assert 0 < records["conv_bn"].max_abs_error < 1e-5


def test_the_profile_decides_which_patterns_are_folded():
    profile = load_profile("x86-cpu")
    fusion = profile.fusion.model_copy(update={"patterns": ("conv_bn",)})
    profile = profile.model_copy(update={"fusion": fusion})
    given = program(nn.Sequential(nn.Linear(4, 6), filled(nn.BatchNorm1d(6))), ("N", 4))
    result, records = optimize(given, profile, {})
    record = next(r for r in records if r.name == "conv_bn")
    assert "linear_bn" in record.declined[0] and BATCH_NORM in targets(result)
    assert next(r for r in optimize(given, PROFILE, {})[1] if r.name == "conv_bn").changed == 1


def test_folded_weights_are_named_after_the_users_and_can_be_trained():
    given = program(nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), filled(nn.BatchNorm2d(2))), ("N", 2, 3, 3))
    result, _ = optimized(given)
    names = dict(result.module.named_parameters())
    assert list(names) == ["inner.0.weight_folded", "inner.0.bias_folded"]
    assert all(p.requires_grad for p in names.values())
    assert list(dict(given.module.named_parameters()))[0] == "inner.0.weight"  # the program given is as it was


class Residual(nn.Module):
    """One in-place ReLU module called twice around an addition, as ResNet blocks have it (case Q12)."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), filled(nn.BatchNorm2d(4), 1)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), filled(nn.BatchNorm2d(4), 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


def test_a_residual_block_with_one_relu_module():
    torch.manual_seed(0)
    given = program(nn.Sequential(Residual(), Residual()), ("N", 4, 5, 5))
    result, records = optimized(given)
    assert records["conv_bn"].changed == 4
    assert targets(result).count("aten.relu.default") == 4 and targets(result).count("aten.add.Tensor") == 2
    assert_equal(result, given, atol=1e-4)
