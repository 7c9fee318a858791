"""A small depthwise-separable CNN for 28 x 28 digits."""

import torch
from torch import nn


def _conv(channels_in: int, channels_out: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def _separable(channels_in: int, channels_out: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        _conv(channels_in, channels_in, 3, stride=stride, groups=channels_in), _conv(channels_in, channels_out, 1)
    )


class DigitNet(nn.Module):
    """Images [batch, 1, 28, 28] with values from 0 to 1 -> {"logits": [batch, 10]}."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(1, 32, 3, stride=2)
        self.features = nn.Sequential(
            _separable(32, 64),
            _separable(64, 64),
            _separable(64, 128, stride=2),
            _separable(128, 128),
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(128, 10)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.features(self.stem(image))
        return {"logits": self.head(self.dropout(x.mean((2, 3))))}


def build() -> nn.Module:
    return DigitNet()
