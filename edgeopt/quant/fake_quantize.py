"""Fake quantization in training: rounds as the integer kernels will, and lets gradients through where nothing clips.

Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR
2018, section 3; the straight-through gradient is Bengio et al., "Estimating or Propagating Gradients Through
Stochastic Neurons", 2013.

torch's own fused operator costs more than the convolution around it on a CPU: its kernels are not vectorised, its
per-channel form loops over the channels, and its mask is a tensor of booleans that the gradient is multiplied by.
Here the same numbers come of plain elementwise operators, and the gradient is cut at two bounds of the input, which
is in memory anyway. Elsewhere than on a CPU torch's operator runs, which is one kernel there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from edgeopt.quant import pt2e

PART = 1 << 17  # values of a tensor that go through all four operators at a time: they stay in a core's cache

Reduce = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Least and greatest value of a batch here -> the least and the greatest over all processes that train together."""


class TrainedFakeQuantize(pt2e.FusedMovingAvgObsFakeQuantize):
    """Fake-quantizes always, and follows the range only while training: evaluation must not move what it measures.

    The range is a moving average over batches. `reduce`, where it is set, makes the processes of a distributed
    training see one range, that of their batches together.
    """

    reduce: Reduce | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        following = self.training and bool(self.observer_enabled)
        if self.is_per_channel:
            return self._by_channel(x, following)
        limits = self._follow(x.detach()) if following else None
        if not bool(self.fake_quant_enabled):
            return x
        if x.device.type != "cpu":
            return self._by_torch(x)
        observer, scale, zero_point = self.activation_post_process, float(self.scale), int(self.zero_point)
        low, high = observer.quant_min - zero_point, observer.quant_max - zero_point
        whole = limits is not None and (low - 0.5) * scale < limits[0] and limits[1] < (high + 0.5) * scale
        # autocast hands over 16 bits, which hold 255 steps and not the sums between them
        return _PerTensor.apply(x.float(), scale, low, high, whole)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale (float32) and zero point (int32) of the range as it is now."""
        observer = self.activation_post_process
        if self.is_per_channel:
            return self._of_channels(observer.min_val, observer.max_val)
        scale, zero_point = self._of_range(float(observer.min_val), float(observer.max_val))
        device = observer.min_val.device
        return torch.tensor(scale, device=device), torch.tensor(zero_point, dtype=torch.int32, device=device)

    def _follow(self, x: torch.Tensor) -> tuple[float, float]:
        """Move the range of a tensor towards its least and greatest value, which are returned.

        In Python's numbers: a dozen tensor operators on scalars, a hundred times a step, cost as much as the rounding.
        """
        observer = self.activation_post_process
        least, greatest = torch.aminmax(x)
        if self.reduce is not None:
            least, greatest = self.reduce(least.float(), greatest.float())
        limits = float(least), float(greatest)
        for kept, new in zip((observer.min_val, observer.max_val), limits, strict=True):
            old = float(kept)
            kept.fill_(new if math.isinf(old) else old + observer.averaging_constant * (new - old))
        scale, zero_point = self._of_range(float(observer.min_val), float(observer.max_val))
        self.scale.fill_(scale)
        self.zero_point.fill_(zero_point)
        return limits

    def _of_range(self, least: float, greatest: float) -> tuple[float, int]:
        observer = self.activation_post_process
        low, high, steps = observer.quant_min, observer.quant_max, observer.quant_max - observer.quant_min
        least, greatest = min(least, 0.0), max(greatest, 0.0)
        if self.is_symmetric_quant:
            return max(max(-least, greatest) / (steps / 2), float(observer.eps)), self._middle()
        scale = max((greatest - least) / steps, float(observer.eps))
        return scale, min(max(low - round(least / scale), low), high) if math.isfinite(scale) else low

    def _middle(self) -> int:
        observer = self.activation_post_process
        return (observer.quant_min + observer.quant_max + 1) // 2 if observer.quant_min >= 0 else 0

    def _by_channel(self, x: torch.Tensor, following: bool) -> torch.Tensor:
        observer = self.activation_post_process
        if following:
            self._follow_channels(x.detach())
        if not bool(self.fake_quant_enabled):
            return x
        if x.device.type != "cpu":
            return self._by_torch(x)
        shape = [1] * x.ndim
        shape[self.ch_axis] = -1
        scale, zero_point = self.scale.reshape(shape), self.zero_point.reshape(shape).to(torch.float32)
        # a range that is the current one's clips nothing
        whole = following and observer.averaging_constant == 1.0
        return _PerChannel.apply(x.float(), scale, zero_point, (observer.quant_min, observer.quant_max), whole)

    def _follow_channels(self, x: torch.Tensor) -> None:
        observer = self.activation_post_process
        least, greatest = torch.aminmax(x.movedim(self.ch_axis, 0).flatten(1), dim=1)
        least, greatest, part = least.float(), greatest.float(), observer.averaging_constant
        if part != 1.0 and observer.min_val.shape == least.shape:
            least = observer.min_val + part * (least - observer.min_val)
            greatest = observer.max_val + part * (greatest - observer.max_val)
        scale, zero_point = self._of_channels(least, greatest)
        for kept, new in (
            (observer.min_val, least), (observer.max_val, greatest), (self.scale, scale), (self.zero_point, zero_point),
        ):  # fmt: skip
            kept.resize_(new.shape).copy_(new)

    def _of_channels(self, least: torch.Tensor, greatest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        observer = self.activation_post_process
        low, high, steps = observer.quant_min, observer.quant_max, observer.quant_max - observer.quant_min
        if self.is_symmetric_quant:
            scale = (torch.maximum(-least, greatest) / (steps / 2)).clamp(min=float(observer.eps))
            return scale, torch.full_like(scale, self._middle(), dtype=torch.int32)
        least, greatest = least.clamp(max=0.0), greatest.clamp(min=0.0)
        scale = ((greatest - least) / steps).clamp(min=float(observer.eps))
        return scale, (low - torch.round(least / scale)).clamp(low, high).to(torch.int32)

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.activation_post_process.quant_min, self.activation_post_process.quant_max
        zero_point = self.zero_point.to(torch.int32)
        if self.is_per_channel:
            return torch.fake_quantize_per_channel_affine(x.float(), self.scale, zero_point, self.ch_axis, low, high)
        return torch.fake_quantize_per_tensor_affine(x.float(), self.scale, zero_point, low, high)


class TrainedPerChannelFakeQuantize(TrainedFakeQuantize):
    """The same for weights; torchao passes the channel axis only to classes with 'PerChannel' in their name."""


class _PerTensor(torch.autograd.Function):
    """clamp(round(x / scale), low, high) * scale, `low` and `high` being the integer range less the zero point.

    `whole` says that no value is out of range: then nothing is cut, and the gradient goes through as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, low: int, high: int, whole: bool) -> torch.Tensor:
        ctx.bounds = None if whole else ((low - 0.5) * scale, (high + 0.5) * scale)
        if not whole:
            ctx.save_for_backward(x)
        out = torch.empty_like(x)
        flat = x.is_contiguous() and out.is_contiguous()
        size = PART * torch.get_num_threads()
        parts = zip(x.view(-1).split(size), out.view(-1).split(size), strict=True) if flat else ((x, out),)
        for part, place in parts:
            torch.mul(part, 1.0 / scale, out=place).round_().clamp_(low, high).mul_(scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.bounds is not None:
            (x,) = ctx.saved_tensors
            gradient = torch.ops.aten.hardtanh_backward(gradient, x, *ctx.bounds)
        return gradient, None, None, None, None


class _PerChannel(torch.autograd.Function):
    """The same with a scale and a zero point a channel, broadcast; `whole` says that no value is out of range."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, range: tuple[int, int], whole: bool
    ) -> torch.Tensor:
        low, high = range
        if not whole:
            ctx.save_for_backward(x, (low - 0.5 - zero_point) * scale, (high + 0.5 - zero_point) * scale)
        steps = (x * (1.0 / scale)).round_()
        if bool(zero_point.any()):
            return steps.add_(zero_point).clamp_(low, high).sub_(zero_point).mul_(scale)
        return steps.clamp_(low, high).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.saved_tensors:
            x, low, high = ctx.saved_tensors
            gradient = gradient * ((x >= low) & (x <= high))
        return gradient, None, None, None, None
