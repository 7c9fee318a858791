"""Products and sums with a constant a channel go into the layer beside them, or stay with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeopt.passes import optimize
from tests.passes.support import PROFILE, assert_equal, optimized, program, targets
from tests.passes.test_simplify import model

ELEMENTWISE = ("aten.mul", "aten.add", "aten.sub", "aten.div", "aten.rsub", "aten.neg")


def left(result) -> int:
    return sum(t.startswith(ELEMENTWISE) for t in targets(result))


class FrozenNorm(nn.Module):
    """BatchNorm as detectors freeze it: buffers, reshaped and multiplied out in every call."""

    def __init__(self, channels: int):
        super().__init__()
        for name in ("weight", "bias", "mean"):
            self.register_buffer(name, torch.randn(channels))
        self.register_buffer("var", torch.rand(channels) + 0.1)

    def forward(self, x):
        w, b, mean, var = (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.mean, self.var))
        scale = w * (var + 1e-5).rsqrt()
        return x * scale + (b - mean * scale)


class Scale(nn.Module):
    """LayerScale and its like: `work` on the tensor and one value a channel."""

    def __init__(self, work, shape):
        super().__init__()
        self.work, self.gamma = work, nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return self.work(x, self.gamma)


AFTER = {
    "frozen norm": (lambda: nn.Conv2d(2, 3, 3, padding=1, bias=False), lambda: FrozenNorm(3), ("N", 2, 5, 5), 2),
    "layer scale": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: x * g, 3), ("N", 7, 4), 1),
    "product first": (lambda: nn.Linear(4, 3, bias=False), lambda: Scale(lambda x, g: g * x, 3), ("N", 4), 1),
    "sum": (lambda: nn.Linear(4, 3, bias=False), lambda: Scale(lambda x, g: g + x, 3), ("N", 4), 1),
    "sum, alpha": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: torch.add(x, g, alpha=3), 3), ("N", 4), 1),
    "sum, alpha on x": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: torch.add(g, x, alpha=3), 3), ("N", 4), 1),
    "less": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: x - g, 3), ("N", 4), 1),
    "less, alpha": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: torch.sub(g, x, alpha=2), 3), ("N", 4), 1),
    "reversed": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: 1 - x, 3), ("N", 4), 1),
    "rsub, alpha": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: torch.rsub(x, g, alpha=2), 3), ("N", 4), 1),
    "quotient": (lambda: nn.Linear(4, 3), lambda: Scale(lambda x, g: x / g, 3), ("N", 4), 1),
    "numbers": (lambda: nn.Conv1d(4, 3, 2), lambda: Scale(lambda x, g: -(x * 0.5 - 2) / 3, 3), ("N", 4, 5), 4),
    "one value": (lambda: nn.Conv1d(4, 3, 2), lambda: Scale(lambda x, g: x * g, 1), ("N", 4, 5), 1),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), lambda: FrozenNorm(6), ("N", 4, 5, 5), 2),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), lambda: FrozenNorm(6), ("N", 4, 5, 5), 2),
    "no batch": (lambda: nn.Conv2d(2, 3, 3), lambda: Scale(lambda x, g: x * g, (3, 1, 1)), (2, 5, 5), 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", AFTER)
def test_after_a_layer(kind):
    torch.manual_seed(0)
    layer, scale, shape, count = AFTER[kind]
    given = program(nn.Sequential(layer(), scale(), nn.ReLU()), shape)
    result, records = optimized(given)
    assert records["conv_affine"].changed == count and left(result) == 0
    assert_equal(result, given, atol=1e-4)


BEFORE = {
    "image": (lambda: Scale(lambda x, g: x / 255, 1), lambda: nn.Conv2d(3, 4, 3, padding=1), ("N", 3, 5, 5), 1),
    "normalised": (
        lambda: Scale(lambda x, g: (x - g) / (g * 2), (3, 1, 1)), lambda: nn.Conv2d(3, 4, 3), ("N", 3, 5, 5), 2,
    ),
    "features": (lambda: Scale(lambda x, g: x * g + g, 4), lambda: nn.Linear(4, 3), ("N", 7, 4), 2),
    "flattened": (
        lambda: FrozenNorm(3), lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False)), ("N", 3, 2, 2), 2,
    ),
    "depthwise": (lambda: FrozenNorm(3), lambda: nn.Conv2d(3, 6, 3, groups=3), ("N", 3, 5, 5), 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", BEFORE)
def test_before_a_layer(kind):
    torch.manual_seed(0)
    scale, layer, shape, count = BEFORE[kind]
    given = program(nn.Sequential(scale(), layer()), shape)
    result, records = optimized(given)
    assert records["conv_affine"].changed == count and left(result) == 0
    assert_equal(result, given, atol=1e-4)


KEPT = {
    "position": (lambda self, x: self.linear(x) + self.table, (3, 4), "differs within a channel"),
    "rows": (lambda self, x: self.linear(x) * self.table[:, :1], (3, 4), "differs within a channel"),
    "larger": (lambda self, x: self.linear(x) * self.table[None].expand(2, 3, 3), (3, 4), "another shape"),
    "double": (lambda self, x: self.linear(x) * self.table[0].double(), (3, 4), "another shape or dtype"),
    "divisor": (lambda self, x: 2.0 / self.linear(x) + self.table, (3, 4), None),
    "two users": (lambda self, x: (y := self.linear(x)) * 2 + y, (3, 4), "other users"),
    "shift, padded": (
        lambda self, x: nn.functional.conv2d(x - 1, self.table[None, None], padding=1), (1, 1, 5, 5), "pads with zeros",
    ),
    "infinite": (lambda self, x: self.linear(x) * 1e39, (3, 4), "not be finite"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_kept_with_the_reason(kind):
    torch.manual_seed(0)
    forward, shape, reason = KEPT[kind]
    module = model(forward, table=torch.randn(3, 3))
    module.linear = nn.Linear(4, 3)
    given = program(module, shape)
    result, records = optimized(given)
    assert records["conv_affine"].changed == 0
    if reason:
        assert any(reason in why for why in records["conv_affine"].declined)
    if kind != "infinite":
        assert_equal(result, given)


@pytest.mark.parametrize("pattern", ["linear_bn", "bn_linear"])
def test_the_profile_decides(pattern):
    patterns = tuple(p for p in PROFILE.fusion.patterns if p != pattern)
    profile = PROFILE.model_copy(update={"fusion": PROFILE.fusion.model_copy(update={"patterns": patterns})})
    layers = (nn.Linear(4, 4), Scale(lambda x, g: x * g, 4))
    given = program(nn.Sequential(*(layers if pattern == "linear_bn" else layers[::-1])), ("N", 4))
    record = next(r for r in optimize(given, profile, {})[1] if r.name == "conv_affine")
    assert record.changed == 0 and f"leave out {pattern}" in record.declined[0]
