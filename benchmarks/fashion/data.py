"""Fashion-MNIST (Debian's dataset-fashion-mnist, MIT) for a project: 60,000 training and 10,000 test images.

Xiao, Rasul, Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_INSTALLED = "usr/share/datasets/fashion-mnist"
PLACES = (Path(__file__).parents[2] / ".zoo/pictures/dataset-fashion-mnist" / _INSTALLED, Path("/") / _INSTALLED)
BATCH = 128
MEAN, DEVIATION = 0.2860, 0.3530  # of the training images' pixels, 0 to 1


@functools.cache
def images(part: str) -> np.ndarray:
    """[count, 1, 28, 28] float32, standardised; `part` is 'train' or 't10k'."""
    raw = _read(f"{part}-images-idx3-ubyte.gz", header=16).reshape(-1, 1, 28, 28)
    return ((raw.astype(np.float32) / 255 - MEAN) / DEVIATION).astype(np.float32)


@functools.cache
def labels(part: str) -> np.ndarray:
    """[count] int64, 0 to 9."""
    return _read(f"{part}-labels-idx1-ubyte.gz", header=8).astype(np.int64)


def calibration() -> Iterator[dict[str, np.ndarray]]:
    """The first 1,024 training images."""
    for i in range(0, 1024, 64):
        yield {"input": images("train")[i : i + 64]}


class train:  # noqa: N801  a loader with a length, called as a function
    """Batches of the training images in a new order each time; the order comes from numpy's global generator."""

    def __len__(self) -> int:
        return len(labels("train")) // BATCH

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        order = np.random.permutation(len(labels("train")))  # noqa: NPY002  edgeopt seeds it
        for i in range(len(self)):
            chosen = order[i * BATCH : (i + 1) * BATCH]
            yield {"input": images("train")[chosen]}, labels("train")[chosen]


def loss(outputs, target):
    """Cross-entropy of the scores."""
    import torch

    return torch.nn.functional.cross_entropy(outputs, torch.as_tensor(target))


def evaluate(predict) -> dict[str, float]:
    """Part of the 10,000 test images whose class is right."""
    return {"top1": float((predictions(predict) == labels("t10k")).mean())}


def predictions(predict) -> np.ndarray:
    """[10000] the class of each test image by `predict({"input": ...}) -> {name: [n, 10]}`."""
    given = images("t10k")
    parts = (next(iter(predict({"input": given[i : i + 250]}).values())) for i in range(0, len(given), 250))
    return np.concatenate([scores.argmax(1) for scores in parts]).astype(np.uint8)


def _read(name: str, header: int) -> np.ndarray:
    for folder in PLACES:
        if (folder / name).is_file():
            with gzip.open(folder / name) as f:
                return np.frombuffer(f.read(), np.uint8, offset=header)
    raise SystemExit(f"{name} is not here: run scripts/fetch-zoo, or apt-get install dataset-fashion-mnist")
