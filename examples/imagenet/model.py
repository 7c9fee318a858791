"""MobileNetV2 (torchvision's key layout) and EfficientNet-Lite0 (its authors' package), for ImageNet's 1000 classes."""

import sys
from pathlib import Path

import torch
from torch import nn

ZOO = Path(__file__).parents[2] / ".zoo"  # made by scripts/fetch-zoo


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.residual = stride == 1 and channels_in == channels_out
        layers = [] if expansion == 1 else [_conv(channels_in, hidden, 1)]
        layers += [_conv(hidden, hidden, 3, stride, hidden)]
        layers += [nn.Conv2d(hidden, channels_out, 1, bias=False), nn.BatchNorm2d(channels_out)]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Images [batch, 3, 224, 224], normalised by ImageNet's mean and deviation -> logits [batch, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        layers, channels = [_conv(3, 32, 3, 2)], 32
        for expansion, width, repeats, stride in (
            (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
        ):  # fmt: skip
            for i in range(repeats):
                layers.append(InvertedResidual(channels, width, stride if i == 0 else 1, expansion))
                channels = width
        self.features = nn.Sequential(*layers, _conv(channels, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(image).mean((2, 3)))


def mobilenet_v2() -> nn.Module:
    return MobileNetV2()


def efficientnet_lite0() -> nn.Module:
    """Images [batch, 3, 224, 224], (x - 127) / 128 of values from 0 to 255 -> logits [batch, 1000]."""
    sys.path.append(str(ZOO / "site"))
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-lite0")
