"""Rules as users write them, models that they are for, and what becomes of a program by one rule alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.passes import Run, optimize
from edgeopt.passes.rules_run import as_pass
from edgeopt.rules import rule, scalar
from tests.passes.support import PROFILE, assert_equal, program

SDPA = "aten.scaled_dot_product_attention.default"
ATTENTION = {
    "q": ("batch", "heads", "queries", "width"),
    "k": ("batch", "heads", "keys", "width"),
    "v": ("batch", "heads", "keys", "width"),
}


def applied(made, given, on: bool = True, **more):
    """The program with the rule alone applied, and the rule's record."""
    how = Run(rules=(as_pass("mine", made),), last="rule:mine", **more)
    result, records = optimize(given, PROFILE, {"rule:mine": on}, how)
    return result, records[-1]


def finds(made, module, *shapes, places: int = 1):
    """The result where the rule matches `places` times, is kept, and equals the model; its record."""
    given = program(module, *shapes)
    result, record = applied(made, given)
    assert (record.name, record.status, record.changed) == ("rule:mine", "applied", places), record
    assert_equal(result, given)
    for node in result.module.graph.nodes:
        assert node.op == "output" or node.meta.get("val") is not None
    return result, record


def misses(made, module, *shapes) -> str:
    """Why the rule was applied nowhere; the graph is as it would be without the rule."""
    given = program(module, *shapes)
    result, record = applied(made, given)
    without, _ = applied(made, given, on=False)
    assert record.status == "nothing" and record.changed == 0, record
    assert str(result.module.graph) == str(without.module.graph)
    assert record.declined
    return "\n".join(record.declined)


class Of(nn.Module):
    """A function of tensors as a module, its result used further."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        returned = self.function(*tensors)
        return torch.cos(returned) if isinstance(returned, torch.Tensor) else tuple(map(torch.cos, returned))


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


FUSED = rule(pattern=attention, replacement=fused, inputs=ATTENTION)


class SelfAttention(nn.Module):
    def __init__(self, scale=lambda scores: scores / math.sqrt(8), axis=-1):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.scale, self.axis = scale, axis

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(self.scale(q @ k.transpose(-2, -1)), self.axis)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


def silu(x):
    return x * torch.sigmoid(x)


SILU = rule(pattern=silu, replacement=lambda x: F.silu(x), inputs={"x": (...,)})


def merged_heads(x):
    b, h, t, d = x.shape
    return torch.relu(x.transpose(1, 2).reshape(b, t, h * d))


MERGED = rule(
    pattern=merged_heads, replacement=lambda x: torch.relu(x).transpose(1, 2).flatten(2),
    inputs={"x": ("b", "h", "t", "d")},
)  # fmt: skip


def norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


NORM = rule(
    pattern=norm, replacement=lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
    inputs={"x": (..., "width"), "weight": ("width",), "bias": ("width",), "eps": scalar(1e-5, 1e-6)},
)  # fmt: skip


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias, self.eps = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6)), eps

    def forward(self, x):
        return norm(x, self.weight, self.bias, self.eps)
