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


class Padded(nn.Module):
    """Convolutions behind explicit zero pads, as converted TensorFlow models have them: more after than before."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, stride=2, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(nn.functional.pad(x, (0, 1, 0, 1))))
        return self.second(nn.functional.pad(x, (1, 2, 0, 1)))


class Excited(nn.Module):
    """Squeeze and excitation: global mean, two small convolutions, a gate, a product."""

    def __init__(self, gate: nn.Module | None = None):
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.reduce, self.expand = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.gate = gate or nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        scale = self.gate(self.expand(torch.relu(self.reduce(x.mean((2, 3), keepdim=True)))))
        return self.last(x * scale)


class Upsampled(nn.Module):
    """Down, up, and together again, as segmenters do it."""

    def __init__(self):
        super().__init__()
        self.first, self.down, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        up = nn.functional.interpolate(torch.relu(self.down(x)), scale_factor=2, mode="nearest")
        return self.last(torch.cat([x, up], 1))


class Shuffled(nn.Module):
    """Half of the channels go through a convolution, and all are shuffled."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.relu(self.stem(x)).chunk(2, dim=1)
        x = torch.cat([left, torch.relu(self.branch(right))], 1)
        n, c, h, w = x.shape
        return self.last(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


class Pooled(nn.Module):
    """Max pooling, average pooling, the mean over all places, a classifier."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = torch.relu(self.second(nn.functional.avg_pool2d(x, 2, stride=1)))
        return self.head(x.mean((2, 3)))


class Leaky(nn.Module):
    """A leaky ReLU between convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.leaky_relu(self.first(x), 0.1))


class Mixer(nn.Module):
    """Attention by torch's own operator, between linear layers."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.out(attended)


class TiedTokens(nn.Module):
    """An embedding whose table is the last layer's weight, as language models have it."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(self.embed(x))))
