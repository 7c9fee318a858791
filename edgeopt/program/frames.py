"""A camera's frames as a model's input: the documented arithmetic in float64, and the same as a module of a graph.

Of frames x, with the axes put as [N, C, H, W]:

1. crop and resize. Place i of `out` along an axis of n values lies at s = ((2 i + 1) n - out) / (2 out), at least 0:
   pixel centres fall on pixel centres (align_corners=False in torch, half_pixel in ONNX, INTER_LINEAR in OpenCV).
   bilinear: x[floor(s)] + (x[floor(s) + 1] - x[floor(s)]) (s - floor(s)), along the width first, the last value
   repeated; nothing is rounded to integers on the way. nearest: x[floor((2 i + 1) n / (2 out))].
2. letterbox: `fill` around it, the odd row or column below and to the right.
3. the channels in the model's order.
4. y = (scale x - mean) / std.

`reference` computes it in float64 and rounds once to float32. The module computes (x - mean / scale) (scale / std) in
float32, places and weights in integers, so that it is off by a few roundings of float32. Movements come before the
cast, on bytes; channels are turned last, where a convolution's weights can take that in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from edgeopt.spec.camera import Camera


@dataclass(frozen=True)
class Lens:
    """A camera and the shape of the model's input that its frames become."""

    camera: Camera
    shape: tuple[int | str, ...]

    def reference(self, frames: np.ndarray) -> np.ndarray:
        return reference(frames, self.camera, self.shape)

    def module(self) -> Frames:
        return Frames(self.camera, self.shape).eval()


@dataclass(frozen=True)
class Placement:
    """Where a frame goes: `window` (top, left, height, width) of it is resized to `inner` (height, width).

    `border`: (top, bottom, left, right) around that.
    """

    window: tuple[int, int, int, int]
    inner: tuple[int, int]
    border: tuple[int, int, int, int]


def placement(frame: tuple[int, int], model: tuple[int, int], fit: str) -> Placement:
    """The placement of a frame of (height, width) in the model's; halves are rounded up."""
    (height, width), (out_height, out_width) = frame, model
    wide = width * out_height > height * out_width
    if fit == "crop":
        part = height if wide else _rounded(width * out_height, out_width)
        side = _rounded(height * out_width, out_height) if wide else width
        return Placement(((height - part) // 2, (width - side) // 2, part, side), model, (0, 0, 0, 0))
    if fit == "stretch":
        return Placement((0, 0, height, width), model, (0, 0, 0, 0))
    inner_height = _rounded(height * out_width, width) if wide else out_height
    inner_width = out_width if wide else _rounded(width * out_height, height)
    top, left = (out_height - inner_height) // 2, (out_width - inner_width) // 2
    border = (top, out_height - inner_height - top, left, out_width - inner_width - left)
    return Placement((0, 0, height, width), (inner_height, inner_width), border)


def _rounded(numerator: int, denominator: int) -> int:
    return max(1, (2 * numerator + denominator) // (2 * denominator))


def reference(frames: np.ndarray, camera: Camera, shape: tuple[int | str, ...]) -> np.ndarray:
    """The model's input of `shape`, float32 [N, C, H, W], for a batch of frames, by the arithmetic above."""
    x = frames.astype(np.float64)
    x = x.transpose(0, 3, 1, 2) if camera.layout == "HWC" else x
    if camera.size is not None:
        x = _resized(x, camera, (shape[2], shape[3]))
    if camera.swaps:
        x = x[:, ::-1]
    mean, std = (np.reshape(np.float64(each), (1, -1, 1, 1)) for each in (camera.mean, camera.std))
    return np.ascontiguousarray(((camera.scale * x - mean) / std).astype(np.float32))


def _resized(x: np.ndarray, camera: Camera, model: tuple[int, int]) -> np.ndarray:
    place = placement(x.shape[2:], model, camera.fit)
    top, left, height, width = place.window
    x = x[:, :, top : top + height, left : left + width]
    for axis, out in ((3, place.inner[1]), (2, place.inner[0])):
        if camera.resize == "nearest":
            x = np.take(x, _nearest(x.shape[axis], out), axis)
        else:
            low, high, weight = _bilinear(x.shape[axis], out)
            before, after = np.take(x, low, axis), np.take(x, high, axis)
            x = before + (after - before) * weight.reshape([-1 if i == axis else 1 for i in range(4)])
    above, below, before, after = place.border
    return np.pad(x, ((0, 0), (0, 0), (above, below), (before, after)), constant_values=camera.fill)


def _bilinear(size: int, out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place below, place above and the weight of the latter, for each of `out` places along `size` values."""
    at = np.maximum(0, (2 * np.arange(out, dtype=np.int64) + 1) * size - out)
    low = at // (2 * out)
    return low, np.minimum(low + 1, size - 1), (at - 2 * out * low) / (2 * out)


def _nearest(size: int, out: int) -> np.ndarray:
    return (2 * np.arange(out, dtype=np.int64) + 1) * size // (2 * out)


class Frames(nn.Module):
    """A batch of frames -> the model's input of `shape`, float32; torch exports, traces and scripts it."""

    def __init__(self, camera: Camera, shape: tuple[int | str, ...]):
        super().__init__()
        self.hwc, self.swaps, self.resizes = camera.layout == "HWC", camera.swaps, camera.size is not None
        self.fill, self.border = float(camera.fill), [0, 0, 0, 0]
        self._place(camera, shape[1], (shape[2], shape[3]) if self.resizes else (1, 1))
        channels = slice(None, None, -1) if camera.swaps else slice(None)  # the frame's order: they are turned last
        offset = np.float64(camera.mean)[channels] / camera.scale
        factor = camera.scale / np.float64(camera.std)[channels]
        self.shifts, self.scales = bool(offset.any()), bool((factor != 1).any())
        self.register_buffer("offset", torch.from_numpy(offset.astype(np.float32)).view(1, -1, 1, 1))
        self.register_buffer("factor", torch.from_numpy(factor.astype(np.float32)).view(1, -1, 1, 1))

    def _place(self, camera: Camera, channels: int, model: tuple[int, int]) -> None:
        fixed = [size if isinstance(size, int) else None for size in camera.size or (1, 1)]
        starts, sizes, inner = (0, 0), fixed, model
        if None not in fixed:
            place = placement((fixed[0], fixed[1]), model, camera.fit)
            starts, sizes, inner = place.window[:2], list(place.window[2:]), place.inner
            above, below, before, after = place.border
            self.border = [before, after, above, below]
        bilinear = camera.resize == "bilinear"
        self.rows = _Taps(starts[0], sizes[0], inner[0], 1 if self.hwc else 2, bilinear)
        # a weight for each value of a row of pixels: runtimes multiply long rows faster than many times 3 values
        repeats = channels if self.hwc else 1
        self.columns = _Taps(starts[1], sizes[1], inner[1], 2 if self.hwc else 3, bilinear, repeats)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = self._resized(frames) if self.resizes else self._planes(frames).to(torch.float32)
        if self.shifts:
            x = x - self.offset
        if self.scales:
            x = x * self.factor
        return x.flip(1) if self.swaps else x

    def _planes(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 3, 1, 2) if self.hwc else x

    def _resized(self, frames: torch.Tensor) -> torch.Tensor:
        top, bottom, down = self.rows(frames)
        left, right, across = self.columns(top)
        x = left.to(torch.float32)
        if across is not None:
            x = x + (right.to(torch.float32) - x) * across
        if down is not None:
            left, right, _ = self.columns(bottom)
            low = left.to(torch.float32)
            if across is not None:
                low = low + (right.to(torch.float32) - low) * across
            x = x + (low - x) * down
        x = self._planes(x)
        if self.border != [0, 0, 0, 0]:
            x = nn.functional.pad(x, self.border, "constant", self.fill)
        return x


class _Taps(nn.Module):
    """What is read along one axis: the values below and above each place, and the weight of the latter or None.

    `size` is None where it is known when the module runs; places are found in integers then too.
    """

    def __init__(self, start: int, size: int | None, out: int, axis: int, bilinear: bool, repeats: int = 1):
        super().__init__()
        self.axis, self.out, self.bilinear, self.fixed = axis, out, bilinear, size is not None
        low, high, weight = _bilinear(size or 1, out)
        if not bilinear:
            low = high = _nearest(size or 1, out)
        self.form, self.repeats = [-1 if i == axis else 1 for i in range(4)], [1, 1, 1, repeats]
        self.register_buffer("low", torch.from_numpy(start + low))
        self.register_buffer("high", torch.from_numpy(start + high))
        self.register_buffer("weight", self._spread(torch.from_numpy(weight.astype(np.float32))))
        self.register_buffer("odd", 2 * torch.arange(out) + 1)
        self.exact = bilinear and size is not None and not weight.any()  # every place is a pixel's centre

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if not self.bilinear or self.exact:
            chosen = x.index_select(self.axis, self._nearest(x))
            return chosen, chosen, None
        if self.fixed:
            return x.index_select(self.axis, self.low), x.index_select(self.axis, self.high), self.weight
        size = x.shape[self.axis]
        at = torch.clamp(self.odd * size - self.out, min=0)
        low = torch.div(at, 2 * self.out, rounding_mode="trunc")
        high = torch.clamp(low + 1, max=size - 1)
        weight = self._spread((at - low * (2 * self.out)).to(torch.float32) / (2 * self.out))
        return x.index_select(self.axis, low), x.index_select(self.axis, high), weight

    def _spread(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view(self.form).repeat(self.repeats)

    def _nearest(self, x: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            return self.low
        return torch.div(self.odd * x.shape[self.axis], 2 * self.out, rounding_mode="trunc")
