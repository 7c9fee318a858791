"""Shoulder exercises seen by a smartwatch: 140 series of 10 people, 7 exercises, acceleration and rotation at 50 Hz.

The data of the package seglearn (Burns et al., "Shoulder physiotherapy exercise recognition", 2018, BSD licence);
`scripts/fetch-zoo` fetches it. People 8 to 10 are kept for evaluation, the others train.
"""

import functools
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[2] / ".zoo/site/seglearn/data/watch_dataset.npy"
SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
WINDOW, STEP = 128, 64  # samples of 20 ms
HELD_OUT = (8, 9, 10)  # subjects
SCALE = np.float32([1, 1, 1, 0.5, 0.5, 0.5])  # rotation rates are about twice as large as accelerations
BATCH = 64


@functools.cache
def windows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows float32 [n, 6, 128], exercises int64 [n] from 0 to 6, and subjects int64 [n] from 1 to 10."""
    if not FILE.is_file():
        raise RuntimeError("the watch data is not there: run scripts/fetch-zoo")
    content = FILE.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise RuntimeError(f"{FILE} is not the file that this example was written for; it is a pickle and is not read")
    held = np.load(io.BytesIO(content), allow_pickle=True).item()
    found, labels, subjects = [], [], []
    for series, label, subject in zip(held["X"], held["y"], held["subject"], strict=True):
        for start in range(0, len(series) - WINDOW + 1, STEP):
            found.append(series[start : start + WINDOW].T)
            labels.append(label)
            subjects.append(subject)
    return np.float32(found) * SCALE[:, None], np.int64(labels), np.int64(subjects)


def split() -> tuple[np.ndarray, np.ndarray]:
    """Indices of the windows that train and of those that evaluate; nobody is in both."""
    held_out = np.isin(windows()[2], HELD_OUT)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def calibration() -> Iterator[dict[str, np.ndarray]]:
    """Every sixth training window, without labels."""
    signals, _, _ = windows()
    chosen = split()[0][::6]
    for start in range(0, len(chosen), BATCH):
        yield {"signal": signals[chosen[start : start + BATCH]]}


def train() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """One epoch over the training windows in a fixed random order."""
    signals, labels, _ = windows()
    order = np.random.default_rng(0).permutation(split()[0])
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        yield {"signal": signals[chosen]}, labels[chosen]


def loss(outputs, target):
    import torch

    return torch.nn.functional.cross_entropy(outputs["scores"], torch.as_tensor(target))


def evaluate(predict: Callable[[dict], dict]) -> dict[str, float]:
    """Accuracy in percent over the windows of three people that training never saw."""
    signals, labels, _ = windows()
    held_out = split()[1]
    right = 0
    for start in range(0, len(held_out), BATCH):
        chosen = held_out[start : start + BATCH]
        right += int((predict({"signal": signals[chosen]})["scores"].argmax(1) == labels[chosen]).sum())
    return {"accuracy": 100 * right / len(held_out)}
