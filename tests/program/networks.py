"""Small networks of the kinds that costs are checked on, as programs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.passes.support import program


class Residual(nn.Module):
    """A conv net with BN, depthwise convolution, a skip and in-place activations, as MobileNetV2's block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.block = nn.Sequential(
            nn.Conv2d(8, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6(inplace=True),
            nn.Conv2d(48, 48, 3, 1, 1, groups=48, bias=False), nn.BatchNorm2d(48), nn.ReLU6(inplace=True),
            nn.Conv2d(48, 8, 1, bias=False), nn.BatchNorm2d(8),
        )  # fmt: skip
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.block(x)).mean((2, 3)))


class Block(nn.Module):
    """A transformer block: separate projections to query, key and value, attention, GELU."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Views(nn.Module):
    """Views of many kinds, reshapes that copy and that do not, parts that are read long after the whole."""

    def forward(self, x):
        a, b = (x * 2).chunk(2, dim=1)
        wide = a.unsqueeze(1).expand(-1, 4, -1, -1)
        c = a.transpose(1, 2).reshape(a.shape[0], -1)  # copies
        d = b.reshape(b.shape[0], -1)  # does not
        return (wide + 1).sum((1, 2, 3)) + c.sum(1) + d.sum(1)


class Branches(nn.Module):
    """Three branches of 1, 2 and 1 convolutions beside each other, then one for all."""

    def __init__(self):
        super().__init__()
        self.left = nn.Conv2d(4, 4, 1)
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.right = nn.Conv2d(4, 4, 3, padding=1)
        self.join = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        return self.join(torch.cat([self.left(x), self.middle(x), self.right(x)], 1))


def residual():
    torch.manual_seed(0)
    return program(Residual(), ("N", 3, 32, 32))


def block():
    torch.manual_seed(0)
    module = Block()
    for weight in module.parameters():  # equal ones would be one tensor in an ONNX file
        nn.init.normal_(weight, std=0.2)
    return program(module, ("N", 24, 32))


def views():
    return program(Views(), ("N", 6, 10))


def branches():
    torch.manual_seed(0)
    return program(Branches(), ("N", 4, 8, 8))
