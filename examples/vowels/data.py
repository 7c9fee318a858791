"""Who says the vowels? Utterances of 9 speakers as 12 LPC cepstrum coefficients a frame, 7 to 29 frames long.

The data set JapaneseVowels (Kudo, Toyama, Shimbo, Pattern Recognition Letters 20, 1999) as the package aeon carries
it; `scripts/fetch-zoo` fetches it. Its own split: 270 utterances train, 370 evaluate. Nothing is padded: a batch
holds utterances of one length.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / ".zoo/site/aeon/datasets/data/JapaneseVowels"
BATCH = 16


@functools.cache
def utterances(part: str) -> tuple[tuple[np.ndarray, int], ...]:
    """`part` 'TRAIN' or 'TEST': (frames float32 [time, 12], speaker from 0 to 8) each."""
    file = FOLDER / f"JapaneseVowels_{part}.ts"
    if not file.is_file():
        raise RuntimeError("the data set JapaneseVowels is not there: run scripts/fetch-zoo")
    rows = file.read_text().split("@data")[1].split()
    found = []
    for row in rows:
        *coefficients, speaker = row.split(":")
        found.append((np.float32([c.split(",") for c in coefficients]).T.copy(), int(speaker) - 1))
    return tuple(found)


def batches(part: str, *, seed: int | None = None) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """({"frames": [batch, time, 12]}, speakers [batch]), every utterance once, of one length a batch."""
    held = utterances(part)
    order = np.arange(len(held)) if seed is None else np.random.default_rng(seed).permutation(len(held))
    by_length: dict[int, list[int]] = {}
    for i in order:
        by_length.setdefault(len(held[i][0]), []).append(int(i))
    groups = [group[at : at + BATCH] for group in by_length.values() for at in range(0, len(group), BATCH)]
    if seed is not None:
        np.random.default_rng(seed + 1).shuffle(groups)
    for group in groups:
        yield {"frames": np.stack([held[i][0] for i in group])}, np.int64([held[i][1] for i in group])


def calibration() -> Iterator[dict[str, np.ndarray]]:
    """The training utterances without labels; every length that they have comes early."""
    return (inputs for inputs, _ in batches("TRAIN", seed=0))


def train() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """One epoch in a fixed random order."""
    return batches("TRAIN", seed=1)


def loss(outputs, target):
    import torch

    return torch.nn.functional.cross_entropy(outputs["scores"], torch.as_tensor(target))


def evaluate(predict: Callable[[dict], dict]) -> dict[str, float]:
    """Accuracy in percent over the 370 utterances of the test set."""
    right = [predict(inputs)["scores"].argmax(1) == speakers for inputs, speakers in batches("TEST")]
    return {"accuracy": 100 * float(np.concatenate(right).mean())}
