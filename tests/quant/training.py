"""Data, losses and short trainings that the tests of training share."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from edgeopt.quant import finetune
from edgeopt.quant.prepare import prepare
from edgeopt.spec.project import Qat
from tests.quant import models
from tests.quant.programs import outputs, program, quantization

cross_entropy = nn.functional.cross_entropy

COLOURS = np.array([[2, 0, 0], [0, 2, 0], [0, 0, 2], [2, 2, 0], [0, 2, 2]], np.float32)


class Loader:
    """Pictures whose class is in their mean colour; shuffled from numpy's global state, as users' loaders do."""

    def __init__(self, count: int = 96, size: int = 16):
        rng = np.random.default_rng(1)
        self.labels = rng.integers(0, 5, count)
        self.pictures = rng.standard_normal((count, 3, 16, 16)).astype(np.float32) / 2
        for picture, label in zip(self.pictures, self.labels, strict=True):
            picture += COLOURS[label][:, None, None]
        self.size = size

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def __iter__(self):
        order = np.random.permutation(len(self.labels))
        for part in order.reshape(-1, self.size):
            yield {"x": self.pictures[part]}, torch.from_numpy(self.labels[part])


def net():
    """A small classifier as a program, the same each time."""
    torch.manual_seed(0)
    return program(models.Net(), 3, 16, 16)


def trained(net, loader=None, loss=cross_entropy, placement="onnxruntime-x86", seed=0, how=None, **settings):
    """(the preparation, its training): six epochs unless `settings` say otherwise; `how` goes to `train`."""
    prepared = prepare(net, quantization(placement), qat=True)
    settings = {"learning_rate": 1e-2, "epochs": 6, **settings}
    data = loader or Loader()
    return prepared, finetune.train(prepared, lambda: data, loss, Qat(**settings), seed=seed, **(how or {}))


def loss_of(p, data) -> float:
    total = [float(cross_entropy(torch.from_numpy(outputs(p, batch["x"])), target)) for batch, target in data]
    return sum(total) / len(total)


def loss_of_module(module) -> float:
    """The summed loss over a fixed order of the data, without drawing from global random states."""
    data, total = Loader(), 0.0
    with torch.no_grad():
        for part in range(0, 96, 16):
            scores = module(torch.from_numpy(data.pictures[part : part + 16]))[0]
            total += float(cross_entropy(scores, torch.from_numpy(data.labels[part : part + 16])))
    return total


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two states are the same bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def moved(state: dict[str, torch.Tensor], net) -> torch.Tensor:
    """How far the weights of a state are from those of the program, as one vector."""
    return torch.cat([(state[k] - v.detach()).flatten() for k, v in sorted(net.module.named_parameters())])
