"""Variations of unlabelled samples, so that a few of them say more of what the float model does.

No label is needed, since the float model answers for each variation: it only has to look like what the model reads.
Pictures (four axes, at most four channels) are cropped, resized back, and mirrored; everything else stays as it is.
"""

from __future__ import annotations

import math

import torch

LEAST_AREA = 0.4  # of a picture that a crop keeps
ASPECT = 0.2  # logarithm of the most that a crop stretches it
MOST_CHANNELS = 4
LEAST_SIDE = 16  # of smaller pictures every row counts


def is_picture(x: torch.Tensor) -> bool:
    """Whether `x` [n, channels, height, width] may be cropped and mirrored."""
    return (
        x.ndim == 4 and x.is_floating_point() and x.shape[1] <= MOST_CHANNELS and min(x.shape[2:]) >= LEAST_SIDE
    )  # fmt: skip


def vary(batch: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """A batch of one input, each picture of it varied by itself; any other batch as it is."""
    if len(batch) != 1 or not is_picture(batch[0]):
        return batch
    return [torch.cat([_varied(x[None], generator) for x in batch[0]])]


def _varied(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    height, width = x.shape[2:]
    part, aspect = math.sqrt(_between(LEAST_AREA, 1.0, generator)), math.exp(_between(-ASPECT, ASPECT, generator))
    rows, columns = (
        max(1, min(size, int(size * part * factor))) for size, factor in ((height, aspect), (width, 1 / aspect))
    )
    top = int(_between(0, height - rows + 1, generator))
    left = int(_between(0, width - columns + 1, generator))
    crop = x[:, :, top : top + rows, left : left + columns]
    crop = torch.nn.functional.interpolate(crop, size=(height, width), mode="bilinear", align_corners=False)
    return crop.flip(3) if _between(0, 1, generator) < 0.5 else crop


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))
