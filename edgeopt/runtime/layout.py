"""Images in channels_last for torch, also where a batch of one leaves torch in doubt.

The stride of a dimension of size 1 says nothing, and torch looks at strides: x[0].unsqueeze(0) of a channels_last
batch is channels_last to `is_contiguous` and to `contiguous`, which then copies nothing, but not to a convolution,
which answers in the other layout (pytorch issues 68430 and 78611, case V03).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from edgeopt.errors import StageError


def channels_last(image: torch.Tensor) -> torch.Tensor:
    """The image (n, c, h, w) in channels_last with the strides (h w c, 1, w c, c), whatever its sizes.

    It is copied only where its elements lie in another order.
    """
    n, c, h, w = image.shape
    laid_out = image.contiguous(memory_format=torch.channels_last)
    wanted = (h * w * c, 1, w * c, c)
    return laid_out if laid_out.stride() == wanted else laid_out.as_strided((n, c, h, w), wanted)


def in_channels_last(model: Callable[..., Any]) -> Callable[..., Any]:
    """`model` called with its images (floating tensors of four dimensions) in channels_last, also within structures.

    Its images come back in channels_last too, which is checked in each call: StageError names the output that is not,
    as after an operator that has no kernel for it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        found = model(*_each(channels_last, args), **_each(channels_last, kwargs))
        _each(_require, found)
        return found

    return call


def _each(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() == 4 and value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(change, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_each(change, item) for item in value)
    return value


def _require(image: torch.Tensor) -> None:
    n, c, h, w = image.shape
    if image.stride() != (h * w * c, 1, w * c, c):
        raise StageError(
            f"an output of shape {tuple(image.shape)} has the strides {image.stride()}, which is not channels_last",
            todo="leave this model in torch's own layout, or end it with an operator that keeps channels_last",
        )
