"""A model of what TorchScript of new versions may write in a way that old ones do not read, in one network.

Convolution, bilinear resizing, GRU, LayerNorm, GELU, attention, and outputs that are nested (case C09).
"""

from __future__ import annotations

import json
from pathlib import Path

MODEL = '''
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    """[n, 3, 16, 16] -> {"scores": [n, 4], "more": ([n, 64, 16], None)}"""
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.SiLU())
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 4)
    def forward(self, image):
        x = F.interpolate(self.conv(image), scale_factor=0.5, mode="bilinear", align_corners=False)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        tokens, _ = self.gru(x.flatten(2).transpose(1, 2))
        q, k, v = self.qkv(F.gelu(self.norm(tokens))).chunk(3, -1)
        tokens = tokens + F.scaled_dot_product_attention(q, k, v)
        return {"scores": self.head(tokens.mean(1)), "more": (tokens, None)}

def build():
    torch.manual_seed(7)
    return Net().eval()
'''
DATA = """
import numpy as np

def calibration():
    for seed in range(4):
        yield {"image": np.random.default_rng(seed).normal(0, 1, (2, 3, 16, 16)).astype(np.float32)}
"""
YAML = {
    "name": "everything", "model": "model.py:build", "calibration": "data.py:calibration",
    "inputs": {"image": {"shape": ["n", 3, 16, 16]}}, "axes": {"n": {"min": 1, "opt": 2, "max": 4}},
}  # fmt: skip


def write(folder: Path) -> Path:
    """The project, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(MODEL)
    (folder / "data.py").write_text(DATA)
    (folder / "edgeopt.yaml").write_text(json.dumps(YAML))  # JSON is YAML
    return folder
