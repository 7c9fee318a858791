"""A small transformer encoder over feature frames, its attention written out as most models have it."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Self-attention over [batch, time, width]: softmax(q k^T / sqrt(d)) v for each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, time, width))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return torch.softmax(scores, dim=-1) @ v


class TorchAttention(Attention):
    """The same by torch's own operator."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, attention: type[Attention]) -> None:
        super().__init__()
        self.attention = attention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Encoder(nn.Module):
    """Frames [batch, time, 40] -> {"scores": [batch, 10]}."""

    def __init__(self, attention: type[Attention] = Attention, width: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        self.embed = nn.Linear(40, width)
        self.layers = nn.Sequential(*(Layer(width, heads, attention) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.head(self.layers(self.embed(frames)).mean(1))}


def build(attention: type[Attention] = Attention) -> nn.Module:
    """The encoder with weights of a fixed seed; a real project names a file of trained ones under `weights`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(attention)


def build_with_torch_attention() -> nn.Module:
    return build(TorchAttention)
