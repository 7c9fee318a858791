"""The models that the benchmarks of passes are taken on, with seeded weights: times do not depend on the values.

ResNet18 and ResNet50 (He et al. 2015, the 1.5 variant that strides in the 3x3), a BERT of all-MiniLM-L6-v2's sizes
(6 layers of 384, 12 heads; Devlin et al. 2018) in decomposed form, and a speaker encoder of three LSTM layers.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.down = _shortcut(inputs, width, stride)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.down(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 around a shortcut, four times as wide at the end."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.down = _shortcut(inputs, 4 * width, stride)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.down(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """image [n, 3, 224, 224] -> scores [n, 1000]."""

    def __init__(self, block: type[Block] | type[Bottleneck], depths: tuple[int, int, int, int]):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        inputs, stages = 64, []
        for i, depth in enumerate(depths):
            width = 64 << i
            for j in range(depth):
                stages.append(block(inputs, width, 2 if i and not j else 1))
                inputs = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, image):
        x = self.stages(self.stem(image))
        return self.head(x.mean((2, 3)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask):
        n, t, width = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads) + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, width))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = _Attention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        x = self.norm1(x + self.attention(x, mask))
        h = self.up(x)
        h = h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))
        return self.norm2(x + self.down(h))


class MiniLM(nn.Module):
    """ids, mask [n, t] of int64 -> sentence embeddings [n, 384]."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 12, words: int = 30522):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))

    def forward(self, ids, mask):
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        bias = (1.0 - mask[:, None, None, :].float()) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        kept = mask[..., None].float()
        mean = (x * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


class SpeakerLstm(nn.Module):
    """mel [n, t, 40] of varying length -> embeddings [n, 256], the sizes of Resemblyzer's encoder."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mel):
        _, (hidden, _) = self.lstm(mel)
        return nn.functional.normalize(torch.relu(self.linear(hidden[-1])), dim=1)


def _seeded(make):
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def resnet18():
    return _seeded(lambda: ResNet(Block, (2, 2, 2, 2)))


def resnet50():
    return _seeded(lambda: ResNet(Bottleneck, (3, 4, 6, 3)))


def minilm():
    return _seeded(MiniLM)


def speaker_lstm():
    return _seeded(SpeakerLstm)


def conv_shapes(model: nn.Module) -> list[tuple[int, int, int, int, int]]:
    """Each distinct convolution of an image model at 224 x 224: (inputs, outputs, kernel, stride, input size)."""
    found: dict[tuple[int, int, int, int, int], None] = {}

    def note(conv, given, _):
        size = given[0].shape[-1]
        found[(conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.stride[0], size)] = None

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    for hook in hooks:
        hook.remove()
    return list(found)


class ConvBnRelu(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, image):
        return torch.relu(self.bn(self.conv(image)))


def conv_bn_relu(shape: tuple[int, int, int, int, int]) -> nn.Module:
    return _seeded(lambda: ConvBnRelu(*shape[:4]))
