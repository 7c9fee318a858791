"""Two small classifiers of Fashion-MNIST, [n, 1, 28, 28] -> [n, 10]: one easy for integers, one hard."""

from __future__ import annotations

import torch
from torch import nn


def _block(inside: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inside, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out), nn.ReLU()]


def _separable(inside: int, out: int, stride: int = 1) -> list[nn.Module]:
    return [*_block(inside, inside, stride=stride, groups=inside), *_block(inside, out, kernel=1)]


def _classifier(features: list[nn.Module], width: int) -> nn.Module:
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def plain() -> nn.Module:
    """Four plain convolutions, 8 to 32 channels."""
    sizes = ((1, 8, 2), (8, 16, 1), (16, 24, 2), (24, 32, 1))
    return _classifier([layer for inside, out, stride in sizes for layer in _block(inside, out, stride=stride)], 32)


def depthwise() -> nn.Module:
    """A stem and four depthwise-separable blocks of 16 to 24 channels, as DS-CNN has them, but narrower.

    DS-CNN: Zhang et al., "Hello Edge: Keyword Spotting on Microcontrollers", 2017, section 3.5.
    """
    sizes = ((16, 24, 2), (24, 24, 1), (24, 24, 1), (24, 24, 1))
    blocks = [layer for inside, out, stride in sizes for layer in _separable(inside, out, stride)]
    return _classifier([*_block(1, 16, stride=2), *blocks], 24)


def rescale(network: nn.Sequential, octaves: float, seed: int) -> None:
    """Make the channels uneven without changing what the network computes, in place.

    Each BatchNorm's channel is multiplied by 2**u, u uniform within +-`octaves`, and the weights that read it are
    divided by that, as ReLU lets through: a ReLU(x) = ReLU(a x) for a > 0. Trained networks are like that: Nagel et
    al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, figure 2.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [layer for layer in network if isinstance(layer, nn.Conv2d | nn.Linear)]
    norms = [layer for layer in network if isinstance(layer, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm, reader in zip(norms, layers[1:], strict=True):
            factor = 2 ** (octaves * (2 * torch.rand(norm.num_features, generator=generator) - 1))
            norm.weight.mul_(factor)
            norm.bias.mul_(factor)
            own = isinstance(reader, nn.Conv2d) and reader.groups > 1  # each output channel reads one of them
            shape = [-1] + [1] * (reader.weight.ndim - 1) if own else [1, -1] + [1] * (reader.weight.ndim - 2)
            reader.weight.div_(factor.reshape(shape))
