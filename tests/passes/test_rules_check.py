"""`check_rule`, with which users test their rules: what passes, and what it says of each kind of fault."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.errors import ProjectError
from edgeopt.rules import check_rule, rule, scalar, tensor


def silu(x):
    return x * torch.sigmoid(x)


def good(**changed):
    return rule(**{"pattern": silu, "replacement": lambda x: F.silu(x), "inputs": {"x": (..., "width")}, **changed})


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def test_dimensions_of_one_name_are_one_though_the_pattern_would_take_others():
    """The width of v is free in the pattern alone; both are dynamic, and one."""
    shapes = {
        "q": ("b", "h", "queries", "width"), "k": ("b", "h", "keys", "width"), "v": ("b", "h", "keys", "width"),
    }  # fmt: skip
    made = rule(
        pattern=[attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v)],
        replacement=lambda q, k, v: torch.softmax(torch.matmul(q * q.shape[-1] ** -0.5, k.mT), -1) @ v, inputs=shapes,
    )  # fmt: skip
    labels = [trial.label for trial in check_rule(made).trials]
    assert labels.count("in a graph of itself with dynamic sizes") == 2


class Model(nn.Module):
    def __init__(self, gate=torch.sigmoid):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.gate = nn.Linear(4, 8), nn.Linear(8, 2), gate

    def forward(self, x):
        for _ in range(2):
            y = self.first(x)
            x = x + self.last(y * self.gate(y)).sum(-1, keepdim=True)
        return x


def test_a_right_rule_passes_with_the_errors_of_each_call():
    checked = check_rule(good(), Model().eval(), [torch.randn(3, 4)], places=2)
    assert checked.places == 2 and len(checked.trials) >= 4
    assert all(0 <= trial.max_abs_error < 1e-5 for trial in checked.trials)
    assert "x [" in checked.trials[0].label


def test_dynamic_axes_of_the_module_and_more_sizes():
    batch = torch.export.Dim("batch", min=1, max=16)
    checked = check_rule(
        good(), Model().eval(), [torch.randn(3, 4)], dynamic_shapes=({0: batch},), sizes=[{"width": 1}, {"width": 37}]
    )
    assert checked.places == 2
    assert any("37" in trial.label for trial in checked.trials)


def test_a_rule_that_matches_nowhere_says_how_near_it_came():
    with pytest.raises(AssertionError, match="matches nowhere in Model") as caught:
        check_rule(good(), Model(torch.tanh).eval(), [torch.randn(3, 4)])
    assert "1 of 2 operators of silu agree" in str(caught.value) and "aten.tanh" in str(caught.value)
    with pytest.raises(AssertionError, match="matches 2 places in the module, not 1"):
        check_rule(good(), Model().eval(), [torch.randn(3, 4)], places=1)


def only_at_four(x):
    return x * torch.sigmoid(x) if x.shape[-1] == 4 else torch.tanh(x)


FAULTS = {
    "another answer": (dict(replacement=lambda x: x * torch.tanh(x)), "is off by"),
    "another answer at other sizes": (dict(replacement=only_at_four), "is off by"),
    "NaN where the pattern has none": (dict(replacement=lambda x: F.silu(x) + (x - x) / (x - x)), "is off by inf"),
    "fails when it runs": (
        dict(replacement=lambda x: F.silu(x.reshape(x.shape)) if torch.compiler.is_exporting() or _fake(x) else _no()),
        "ValueError: only in theory",
    ),
    "its own check is against it": (dict(check=lambda match: "never"), "never"),
    "one spelling differs": (dict(pattern=[silu, lambda x: x * torch.sigmoid(x * 1.5)]), "is off by"),
}  # fmt: skip


def _fake(x):
    return isinstance(x, torch._subclasses.FakeTensor)


def _no():
    raise ValueError("only in theory")


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_fails_with_the_users_line(name):
    changed, said = FAULTS[name]
    with pytest.raises(AssertionError) as caught:
        check_rule(good(**changed))
    assert said in str(caught.value), caught.value
    assert "test_rules_check.py, line " in str(caught.value)


def test_functions_that_cannot_be_traced_are_told_as_in_a_build():
    with pytest.raises(ProjectError, match="only in theory") as caught:
        check_rule(good(pattern=lambda x: _no()))
    assert "test_rules_check.py, line " in caught.value.where


def test_a_module_in_training_mode_is_refused():
    with pytest.raises(AssertionError, match="call eval"):
        check_rule(good(), Model(), [torch.randn(3, 4)])


def test_numbers_dtypes_and_value_ranges():
    def pattern(x, index, low):
        return torch.log(x.clamp_min(low)).index_select(0, index)

    made = rule(
        pattern=pattern, replacement=lambda x, index, low: torch.log(x.index_select(0, index).clamp_min(low)),
        inputs={
            "x": tensor("rows", 3, values=(0.5, 2.0)),
            "index": tensor("picked", dtype=torch.int64, values=(0, 3)),
            "low": scalar(0.1, 0.7),
        },
    )  # fmt: skip
    checked = check_rule(made)
    assert any("low=0.7" in trial.label for trial in checked.trials)
    assert all(math.isfinite(trial.max_rel_error) for trial in checked.trials)


def test_half_precision_is_judged_by_its_own_noise():
    made = rule(
        pattern=lambda x, w: torch.relu(x @ w), replacement=lambda x, w: torch.clamp_min(torch.matmul(x, w), 0),
        inputs={"x": tensor("n", "c", dtype=torch.float16), "w": tensor("c", "d", dtype=torch.float16)},
    )  # fmt: skip
    check_rule(made, sizes=[{"c": 256}])


def rotary(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def masked(q, k, v, mask):
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~mask, -1e9), -1) @ v


def group_norm(x):
    b, c, h, w = x.shape
    y = x.reshape(b, 4, c // 4, h, w)
    y = (y - y.mean((2, 3, 4), keepdim=True)) * torch.rsqrt(y.var((2, 3, 4), keepdim=True, unbiased=False) + 1e-5)
    return y.reshape(b, c, h, w)


def shuffled(x):
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, -1, h, w) + 0


IMAGE = {"x": ("b", "c", "h", "w")}
KINDS = {
    "gelu": (lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), {"x": (...,)}),
    "gelu by tanh": (
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), {"x": (...,)},
    ),
    "rms norm": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, {"x": (..., "c"), "w": ("c",)},
    ),
    "gated": (lambda x: (lambda a, b: a * torch.sigmoid(b))(*x.chunk(2, -1)), {"x": (..., "c")}),
    "rotary": (rotary, {"x": ("b", "h", "t", "d"), "cos": ("t", "d"), "sin": ("t", "d")}),
    "masked attention": (
        masked,
        {
            "q": ("b", "h", "t", "d"), "k": ("b", "h", "s", "d"), "v": ("b", "h", "s", "d"),
            "mask": tensor("b", 1, "t", "s", dtype=torch.bool),
        },
    ),
    "convolution and norm": (
        lambda x, w, m, v: torch.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v)),
        {"x": ("b", "c", "h", "w"), "w": ("o", "c", 3, 3), "m": ("o",), "v": tensor("o", values=(0.5, 2.0))},
    ),
    "group norm": (group_norm, IMAGE),
    "channel shuffle": (shuffled, IMAGE),
    "pooling": (lambda x: F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1), IMAGE),
    "upsampling": (lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest") * 2, IMAGE),
    "einsum": (lambda q, k: torch.einsum("bhtd,bhsd->bhts", q, k).relu(), {n: ("b", "h", n, "d") for n in "qk"}),
    "linear": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)), {"x": (..., "c"), "w": ("o", "c"), "b": ("o",)},
    ),
    "several results": (
        lambda x: (lambda found: found.values * torch.exp(found.values[..., :1]))(torch.topk(x, 2, -1)),
        {"x": (..., "c")},
    ),
    "where": (lambda x, y: torch.where(x > 0.5, y, x.new_zeros(())), {"x": ("n",), "y": ("n",)}),
    "stacked": (lambda x, y: torch.stack([y, x], -1).flatten(-2), {"x": ("n", "c"), "y": ("n", "c")}),
    "table": (
        lambda ids, w: F.embedding(ids, w) * 2,
        {"ids": tensor("n", dtype=torch.int64, values=(0, 3)), "w": ("v", "c")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_pattern_finds_itself_and_gives_the_same(name):
    """The replacement is the pattern: what is traced, found, put in and run again is the model."""
    function, inputs = KINDS[name]
    checked = check_rule(rule(pattern=function, replacement=function, inputs=inputs))
    assert any("fixed sizes" in trial.label for trial in checked.trials)
