"""A small real project in a folder: a conv net with BN on 12 x 12 images of bars, all stages in a few seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    """[n, 1, 12, 12] -> {"scores": [n, 2]}: is the bar upright or lying?"""
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6())
        self.head = nn.Linear(8, 2)
    def forward(self, image):
        x = self.first(image)
        x = x + self.second(x)
        return {"scores": self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))}

def build():
    torch.manual_seed(3)
    net = Net()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2); module.running_var.uniform_(0.5, 1.5)
    return net
'''

DATA = '''
import numpy as np

def bars(count, seed):
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 0.1, (count, 1, 12, 12)).astype(np.float32)
    labels = rng.integers(0, 2, count)
    for image, label in zip(images, labels):
        at = rng.integers(1, 11)
        image[0, :, at] += 1.0 * (label == 0)
        image[0, at, :] += 1.0 * (label == 1)
    return images, labels

def calibration():
    images, _ = bars(64, 1)
    for i in range(0, 64, 16):
        yield {"image": images[i : i + 16]}

def train():
    images, labels = bars(128, 2)
    for i in range(0, 128, 16):
        yield {"image": images[i : i + 16]}, labels[i : i + 16]

def loss(outputs, target):
    import torch
    return torch.nn.functional.cross_entropy(outputs["scores"], torch.as_tensor(target))

def evaluate(predict):
    """Mean probability of class 0: a smooth figure, so that a small error shows as a small change."""
    images, _ = bars(48, 3)
    scores = np.concatenate([predict({"image": images[i : i + 16]})["scores"] for i in range(0, 48, 16)])
    e = np.exp(scores - scores.max(1, keepdims=True))
    return {"p0": float((e / e.sum(1, keepdims=True))[:, 0].mean())}
'''

YAML = {
    "name": "bars",
    "model": "model.py:build",
    "inputs": {"image": {"shape": ["n", 1, 12, 12]}},
    "axes": {"n": {"min": 1, "opt": 1, "max": 16}},
    "calibration": "data.py:calibration",
    "train": "data.py:train",
    "loss": "data.py:loss",
    "qat": {"epochs": 1, "learning_rate": 1.0e-4},
    "evaluate": "data.py:evaluate",
    "limits": {"metric_drop": {"p0": 0.05}},
}


def write_project(
    folder: Path, *, without: tuple[str, ...] = (), data_code: str = "", model_code: str = "", **changes
) -> Path:
    """The project in `folder`; `without` leaves keys out, `changes` replace them, the code is appended to the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(MODEL + model_code)
    (folder / "data.py").write_text(DATA + data_code)
    values = {key: value for key, value in {**YAML, **changes}.items() if key not in without}
    (folder / "edgeopt.yaml").write_text(json.dumps(values))  # JSON is YAML
    return folder


# for the CPU profiles where a test does not ask for others: OpenVINO has tests of its own, and each other build would
# take some seconds more with it
BACKENDS = ("--set", "profile.backends=[onnxruntime, torchscript]")
BUILD = (sys.executable, "-m", "edgeopt", "build", "--profile", "x86-cpu", *BACKENDS)  # as a process that a test kills


def run_edgeopt(*argv: str, cwd: Path | None = None, timeout_s: float = 300) -> subprocess.CompletedProcess:
    """`edgeopt` in a process of its own, output as text."""
    lowers = argv[0] in ("build", "bisect", "inspect") and {"x86-cpu", "arm64-cpu"} & set(argv)
    others = any(word.startswith("profile.backends=") for word in argv)
    backends = BACKENDS if lowers and not others else ()
    return subprocess.run(
        [sys.executable, "-m", "edgeopt", *argv, *backends], cwd=cwd, capture_output=True, text=True, timeout=timeout_s
    )
