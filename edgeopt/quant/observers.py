"""Observers of ranges: torchao's where they serve, chosen by the profile's `ranges`."""

from __future__ import annotations

from typing import Any

import torch

from edgeopt.quant import clipping, pt2e
from edgeopt.quant.fake_quantize import TrainedFakeQuantize, TrainedPerChannelFakeQuantize
from edgeopt.quant.histogram import Histogram

# Only what is all zero may meet it: torchao's 2**-23 leaves few steps to weights of 1e-5 or inputs in small units.
# Products of two and a bias over them still are normal float32; `findings.fit_biases` keeps those biases in int32.
LEAST_SCALE = 2.0**-40

TAIL = 5e-5  # part of the values that the percentile method clips at each end: 99.99 % lie within
KEPT = 512  # of the most extreme values, enough for ten million samples
SAMPLES = 1 << 15  # values of a batch that count for everything but the whole range
MOMENTS = 1 << 12  # of those, as many as about count for mean and deviation


class Watched:
    """Keeps mean and deviation of an even sample beside the range, which tell a range that few values need.

    A batch is read once for its range, and a sample of it of at most SAMPLES values for the rest; it is not copied.
    Nothing kept grows with the number of batches.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._taken = 0  # values of samples
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # of some of them; squares of the distance to the mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            seen = _flat(x.detach())
            self.widen(*torch.aminmax(seen))
            self.take(_even_sample(seen, SAMPLES))
        return x

    def widen(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Make the range hold a batch whose lowest and highest values these are."""
        torch.minimum(self.min_val, low, out=self.min_val)
        torch.maximum(self.max_val, high, out=self.max_val)

    def take(self, sample: torch.Tensor) -> None:
        """Note a batch's sample, 1-D.

        Its lowest and highest value do not count for the deviation: an outlier would hide itself. Means join as in
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979, 2.1.
        """
        self._taken += sample.numel()
        few = _even_sample(sample, MOMENTS)
        variance, mean = (float(v) for v in torch.var_mean(few, correction=0))
        count, squares = few.numel(), variance * few.numel()
        if count > 3:
            for extreme in map(float, torch.aminmax(few)):
                before, mean = mean, mean + (mean - extreme) / (count - 1)
                squares, count = max(squares - (extreme - before) * (extreme - mean), 0.0), count - 1
        total, shift = self._count + count, mean - self._mean
        self._squares += squares + shift * shift * self._count * count / total
        self._mean += shift * count / total
        self._count = total

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest and highest value that is not clipped."""
        return self.min_val, self.max_val

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of the range that is not clipped."""
        return self._calculate_qparams(*self.range())

    def deviation(self) -> float:
        """Standard deviation of the values seen, the most extreme left out; 0 before any."""
        return (self._squares / self._count) ** 0.5 if self._count else 0.0


class MinMaxObserver(Watched, pt2e.MinMaxObserver):
    """The whole range."""


class MovingAverageObserver(Watched, pt2e.MovingAverageMinMaxObserver):
    """The range as an average over batches, so that a single batch with outliers counts little."""

    def widen(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """The first batch gives the range, each later one moves it by `averaging_constant` of the difference."""
        part = self.averaging_constant if self._count else None
        for held, new in ((self.min_val, low), (self.max_val, high)):
            if part is None:
                held.copy_(new)
            else:
                held.lerp_(new, part)


class PercentileObserver(Watched, pt2e.MinMaxObserver):
    """A range that leaves out the most extreme 0.01 % of values, from the exact extremes of an even sample."""

    smallest: torch.Tensor
    largest: torch.Tensor

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.register_buffer("smallest", torch.full((KEPT,), float("inf")))
        self.register_buffer("largest", torch.full((KEPT,), float("-inf")))

    def take(self, sample: torch.Tensor) -> None:
        """Note a batch's sample, 1-D."""
        super().take(sample)
        self.largest.copy_(torch.cat([self.largest, sample]).topk(KEPT).values)
        self.smallest.copy_(torch.cat([self.smallest, sample]).topk(KEPT, largest=False).values)

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest and highest value of the range; of everything where the sample is too small for a percentile."""
        clipped = min(int(self._taken * TAIL), KEPT - 1)
        if not clipped:
            return self.min_val, self.max_val
        return self.smallest[clipped], self.largest[clipped]


class HistogramObserver(Watched, pt2e.MinMaxObserver):
    """A range found from a histogram of an even sample; what is asked of the range is the subclass's `search`."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._histogram = Histogram()
        self._found: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None  # how many values it is of, the range

    def take(self, sample: torch.Tensor) -> None:
        """Note a batch's sample, 1-D."""
        super().take(sample)
        self._histogram.add(sample)

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest and highest value of the range that the search finds; of everything before any value."""
        if not self._taken:
            return self.min_val, self.max_val
        if self._found is None or self._found[0] != self._taken:
            symmetric = self.qscheme == torch.per_tensor_symmetric
            low, high = self.search(clipping.Grid(self.quant_min, self.quant_max, symmetric, self._scales))
            self._found = self._taken, (self.min_val.new_tensor(low), self.min_val.new_tensor(high))
        return self._found[1]

    def search(self, grid: clipping.Grid) -> tuple[float, float]:
        """(lowest, highest) value of the range."""
        raise NotImplementedError

    def _scales(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, zeros = self._calculate_qparams(low.to(self.min_val.dtype), high.to(self.min_val.dtype))
        return scales.double(), zeros.double()


class LeastErrorObserver(HistogramObserver):
    """The range whose rounding and clipping together have the least squared error."""

    def search(self, grid: clipping.Grid) -> tuple[float, float]:
        """(lowest, highest) value of the range."""
        return clipping.least_error(*self._histogram.bins(), grid)


class EntropyObserver(HistogramObserver):
    """The range whose integers tell the most of how the values are distributed."""

    def search(self, grid: clipping.Grid) -> tuple[float, float]:
        """(lowest, highest) value of the range."""
        return clipping.least_divergence(*self._histogram.bins(), grid)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements as they lie in memory, without a copy where they lie densely, in whatever order of dimensions."""
    if x.is_contiguous():
        return x.view(-1)
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).reshape(-1)


def _even_sample(flat: torch.Tensor, most: int) -> torch.Tensor:
    """About `most` values. The step shares no small factor with image sizes, so that all positions take part."""
    step = flat.numel() // most
    if step <= 1:
        return flat
    while any(step % prime == 0 for prime in (2, 3, 5, 7)):
        step += 1
    return flat[::step]


def rounded(observer: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    """What the integers of an observer's or fake-quantizer's range make of `value`."""
    if isinstance(observer, pt2e.DerivedObserverOrFakeQuantize):  # an int32 bias: its rounding does not show
        return value
    ranges = getattr(observer, "activation_post_process", observer)
    scale, zero_point = ranges.calculate_qparams()
    low, high = ranges.quant_min, ranges.quant_max
    if scale.numel() > 1:
        zero_point = zero_point.to(torch.int32)
        return torch.fake_quantize_per_channel_affine(value, scale, zero_point, ranges.ch_axis, low, high)
    return torch.fake_quantize_per_tensor_affine(value, float(scale), int(zero_point), low, high)


class _Stored:
    """Observes a stored tensor once, and again only when it was changed: calibration runs it with every batch."""

    _seen: tuple[int, int] | None = None  # identity and version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = (id(x), x._version)
        if now != self._seen:
            super().forward(x)
            self._seen = now
        return x


class WeightObserver(_Stored, pt2e.MinMaxObserver):
    """Least and largest value."""


class PerChannelWeightObserver(_Stored, pt2e.PerChannelMinMaxObserver):
    """Least and largest value of each channel."""


_RANGES = {
    "minmax": MinMaxObserver,
    "moving-average": MovingAverageObserver,
    "percentile": PercentileObserver,
    "mse": LeastErrorObserver,
    "entropy": EntropyObserver,
}


def for_weights(*, per_channel: bool, qat: bool) -> Any:
    """The observer of weights: least and largest value, which is exact for stored tensors."""
    if not qat:
        plain = PerChannelWeightObserver if per_channel else WeightObserver
        return plain.with_args(eps=LEAST_SCALE)
    observer = pt2e.MovingAveragePerChannelMinMaxObserver if per_channel else pt2e.MovingAverageMinMaxObserver
    fake = TrainedPerChannelFakeQuantize if per_channel else TrainedFakeQuantize
    # an averaging constant of 1 takes the current weights' range, not a trail of past ones
    return fake.with_args(observer=observer, averaging_constant=1.0, eps=LEAST_SCALE)


def for_activations(ranges: str, *, qat: bool) -> Any:
    """The observer of activations for the profile's `ranges`; training always follows a moving average."""
    if qat:
        return TrainedFakeQuantize.with_args(observer=pt2e.MovingAverageMinMaxObserver, eps=LEAST_SCALE)
    return _RANGES[ranges].with_args(eps=LEAST_SCALE)
