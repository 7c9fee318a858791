"""Observers of ranges: torchao's where they serve, chosen by the profile's `ranges`."""

from __future__ import annotations

from typing import Any

import torch

from edgeopt.quant import pt2e

# A channel of zeros would else get 2**-23, and the int32 bias beside it could overflow.
LEAST_WEIGHT_SCALE = 2.0**-20

TAIL = 5e-5  # part of the values that the percentile method clips at each end: 99.99 % lie within
KEPT = 512  # of the most extreme values, enough for ten million samples
SAMPLES = 1 << 15  # values of a batch that count for the percentile


class Watched:
    """Keeps mean and deviation of an even sample beside the range, which tell a range that few values need."""

    moments: torch.Tensor

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.register_buffer("moments", torch.zeros(3, dtype=torch.float64))  # count, sum, sum of squares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        sample = _even_sample(x.detach().reshape(-1)).double()
        self.moments += torch.stack([torch.tensor(float(sample.numel())), sample.sum(), sample.square().sum()])
        return x

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest and highest value that is not clipped."""
        return self.min_val, self.max_val

    def deviation(self) -> float:
        """Standard deviation of the values seen; 0 before any."""
        count, total, squares = self.moments.tolist()
        return max(squares / count - (total / count) ** 2, 0.0) ** 0.5 if count else 0.0


class MinMaxObserver(Watched, pt2e.MinMaxObserver):
    """The whole range."""


class MovingAverageObserver(Watched, pt2e.MovingAverageMinMaxObserver):
    """The range as an average over batches, so that a single batch with outliers counts little."""


class PercentileObserver(Watched, pt2e.MinMaxObserver):
    """A range that leaves out the most extreme 0.01 % of values, from the exact extremes of an even sample.

    Memory does not grow with the number of batches. torchao's HistogramObserver answers another question (least
    squared error, which keeps a far outlier) and interpolates histograms for every batch.
    """

    smallest: torch.Tensor
    largest: torch.Tensor
    taken: torch.Tensor

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.register_buffer("smallest", torch.full((KEPT,), float("inf")))
        self.register_buffer("largest", torch.full((KEPT,), float("-inf")))
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        sample = _even_sample(x.detach().reshape(-1)).to(self.largest.dtype)
        self.taken += sample.numel()
        self.largest.copy_(torch.cat([self.largest, sample]).topk(KEPT).values)
        self.smallest.copy_(torch.cat([self.smallest, sample]).topk(KEPT, largest=False).values)
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of the percentile range; of the whole range where the sample is too small for one."""
        return self._calculate_qparams(*self.range())

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest and highest value of the range."""
        clipped = min(int(int(self.taken) * TAIL), KEPT - 1)
        if not clipped:
            return self.min_val, self.max_val
        return self.smallest[clipped], self.largest[clipped]


def _even_sample(flat: torch.Tensor) -> torch.Tensor:
    """About SAMPLES values. The step shares no small factor with image sizes, so that all positions take part."""
    step = flat.numel() // SAMPLES
    if step <= 1:
        return flat
    while any(step % prime == 0 for prime in (2, 3, 5, 7)):
        step += 1
    return flat[::step]


class TrainedFakeQuantize(pt2e.FusedMovingAvgObsFakeQuantize):
    """Fake-quantizes always, and follows the range only while training: evaluation must not move what it measures."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        observer = self.activation_post_process
        return torch.fused_moving_avg_obs_fake_quant(
            x,
            self.observer_enabled if self.training else torch.zeros_like(self.observer_enabled),
            self.fake_quant_enabled,
            observer.min_val,
            observer.max_val,
            self.scale,
            self.zero_point,
            observer.averaging_constant,
            observer.quant_min,
            observer.quant_max,
            self.ch_axis,
            self.is_per_channel,
            self.is_symmetric_quant,
        )


class TrainedPerChannelFakeQuantize(TrainedFakeQuantize):
    """The same for weights; torchao passes the channel axis only to classes with 'PerChannel' in their name."""


_RANGES = {
    "minmax": MinMaxObserver,
    "moving-average": MovingAverageObserver,
    "percentile": PercentileObserver,
}


def for_weights(*, per_channel: bool, qat: bool) -> Any:
    """The observer of weights: least and largest value, which is exact for stored tensors."""
    if not qat:
        plain = pt2e.PerChannelMinMaxObserver if per_channel else pt2e.MinMaxObserver
        return plain.with_args(eps=LEAST_WEIGHT_SCALE)
    observer = pt2e.MovingAveragePerChannelMinMaxObserver if per_channel else pt2e.MovingAverageMinMaxObserver
    fake = TrainedPerChannelFakeQuantize if per_channel else TrainedFakeQuantize
    # an averaging constant of 1 takes the current weights' range, not a trail of past ones
    return fake.with_args(observer=observer, averaging_constant=1.0, eps=LEAST_WEIGHT_SCALE)


def for_activations(ranges: str, *, qat: bool) -> Any:
    """The observer of activations for the profile's `ranges`; training always follows a moving average."""
    if qat:
        return TrainedFakeQuantize.with_args(observer=pt2e.MovingAverageMinMaxObserver)
    return _RANGES[ranges].with_args()
