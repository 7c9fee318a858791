"""Small models whose parts the tests of quant/ name."""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    """A block whose only ReLU module is called twice, with its BatchNorms folded away."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.second(self.relu(self.first(x))) + x)


class Net(nn.Module):
    """Stem, residual block, pooling, classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.block = Residual()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.block(torch.relu(self.stem(x)))).flatten(1))


class Tied(nn.Module):
    """Two convolutions of one weight."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.relu(self.conv(x)))


class Branches(nn.Module):
    """Two convolutions of very different range, concatenated."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(8, 2, 1)
        with torch.no_grad():
            self.large.weight.mul_(50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.small(x), self.large(x)], 1))


class Gated(nn.Module):
    """Convolution, a smooth activation, convolution."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.first, self.activation, self.second = nn.Conv2d(3, 8, 1), activation, nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.activation(self.first(x)))


class Attention(nn.Module):
    """Matrix products of activations by activations and by weights, softmax between."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / 4
        return self.norm(x + self.out(torch.matmul(scores.softmax(-1), self.value(x))))


class Tokens(nn.Module):
    """Integer input, embedding, classifier."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x).mean(1))
