"""The fusion rule of this project: attention, however it is written, becomes one operator of our own."""

import math

import torch
import torch.nn.functional as F

from edgeopt.rules import Match, rule


def written_out(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v


def scaled_before(q, k, v):
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    return torch.softmax(scores, dim=-1) @ v


def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def fused(q, k, v):
    return torch.ops.custom_ops.fused_attention(q, k, v)


def supported(match: Match) -> str | None:
    if match["q"].dtype is not torch.float32:
        return f"the operator is written for float32, and this is {match['q'].dtype}"
    return None


fused_attention = rule(
    pattern=[written_out, scaled_before, by_torch],
    replacement=fused,
    inputs={
        "q": ("batch", "heads", "queries", "width"),
        "k": ("batch", "heads", "keys", "width"),
        "v": ("batch", "heads", "keys", "width"),
    },
    check=supported,
)
