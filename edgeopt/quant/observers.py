"""Observers of ranges: torchao's where they serve, chosen by the profile's `ranges`."""

from __future__ import annotations

from typing import Any

import torch

from edgeopt.quant import pt2e

# The least scale. A channel of zeros would else get 2**-23, and the int32 bias beside it could overflow.
LEAST_WEIGHT_SCALE = 2.0**-20


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
    "minmax": pt2e.MinMaxObserver,
    "moving-average": pt2e.MovingAverageMinMaxObserver,
    "histogram": pt2e.MinMaxObserver,
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
