"""Integers that gradients reach: what stands for an observer while a quantized program learns from the float one.

A scale is learned as in Esser et al., "Learned Step Size Quantization", ICLR 2020, section 2.1: the derivative of
s clamp(round(x / s)) in s is the integer less x / s where nothing is cut, else the integer. Gradients pass a rounding
as they are (Bengio et al., 2013). Weights are held in steps of their scale, so that a learning rate means the same in
every layer, and a scale that moves takes its integers along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.quant import observers, pt2e

STEPS, BIASES, SCALES, RANGES = (
    "steps",
    "biases",
    "scales",
    "ranges",
)  # kinds of parameters, each with a rate of its own


class Values(torch.nn.Module):
    """An activation at a learned scale; its zero point stays."""

    def __init__(self, observer: torch.nn.Module):
        super().__init__()
        scale, zero_point = observer.calculate_qparams()
        self.register_buffer("scale", scale.detach().clone().reshape(()).float())
        self._zero = int(zero_point)
        self._low, self._high = observer.quant_min - self._zero, observer.quant_max - self._zero
        self.change = torch.nn.Parameter(torch.zeros(()))  # logarithm of a factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(x, self.scale * self.change.exp(), self._low, self._high)

    def parameters_by_kind(self) -> dict[str, torch.nn.Parameter]:
        return {RANGES: self.change}

    def settle(self, observer: torch.nn.Module) -> None:
        """Give the observer what was learned."""
        scale = self.scale * self.change.detach().exp()
        observer.settle(self._low * scale, self._high * scale)


class Weights(torch.nn.Module):
    """A stored weight as steps of its scales, one a channel or one for all; `node` reads it."""

    def __init__(self, observer: torch.nn.Module, module: GraphModule, node: Node):
        super().__init__()
        self._module, self._node = (module,), node  # in a tuple: not a submodule
        self._limits = observer.quant_min, observer.quant_max
        weight = stored.tensor(module, node)
        scale, _ = observer.calculate_qparams()
        shape = [1] * weight.ndim
        if scale.numel() > 1:
            shape[observer.ch_axis] = -1
        self.register_buffer("scale", scale.detach().clone().float().reshape(shape))
        self.steps = torch.nn.Parameter((weight / self.scale).clamp(*self._limits))
        self.change = torch.nn.Parameter(torch.zeros_like(self.scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self._limits
        within = self.steps.clamp(low - 0.49, high + 0.49)
        whole = within + (within.round() - within).detach()
        return whole * (self.scale * self.change.exp())

    def parameters_by_kind(self) -> dict[str, torch.nn.Parameter]:
        return {STEPS: self.steps, SCALES: self.change}

    def settle(self, observer: torch.nn.Module) -> None:
        """Store the integers times their scales, and give the observer the scales."""
        scale = self.scale * self.change.detach().exp()
        whole = self.steps.detach().round().clamp(*self._limits)
        stored.tensor(self._module[0], self._node).copy_(whole * scale)
        half = (scale * (observer.quant_max - observer.quant_min) / 2).reshape(observer.max_val.shape)
        observer.max_val.copy_(half)
        observer.min_val.copy_(-half)


class Bias(torch.nn.Module):
    """A stored bias, learned in parts of the mean of all of its layer's; its int32 rounding does not show."""

    def __init__(self, module: GraphModule, node: Node):
        super().__init__()
        self._module, self._node = (module,), node
        bias = stored.tensor(module, node)
        self.register_buffer("bias", bias.clone())
        self.register_buffer("unit", bias.abs().mean().clamp_min(torch.finfo(bias.dtype).tiny))
        self.change = torch.nn.Parameter(torch.zeros_like(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias + self.unit * self.change

    def parameters_by_kind(self) -> dict[str, torch.nn.Parameter]:
        return {BIASES: self.change}

    def settle(self, observer: torch.nn.Module) -> None:
        """Store what was learned."""
        stored.tensor(self._module[0], self._node).copy_(self.bias + self.unit * self.change.detach())


class Fixed(torch.nn.Module):
    """What is rounded and does not learn: tensors that several layers read, ranges that calibration left empty."""

    def __init__(self, observer: torch.nn.Module):
        super().__init__()
        self._observer = (observer,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Passed.apply(x, observers.rounded(self._observer[0], x.detach()))

    def parameters_by_kind(self) -> dict[str, torch.nn.Parameter]:
        return {}

    def settle(self, observer: torch.nn.Module) -> None:
        """Nothing was learned."""


def of(module: GraphModule, node: Node) -> torch.nn.Module:
    """What stands for the observer that `node` calls: it learns where what it observes is the layer's own."""
    observer, source = module.get_submodule(node.target), node.args[0]
    own = stored.is_stored(module, source) and stored.users(module, str(source.target)) == {node}
    if isinstance(observer, pt2e.DerivedObserverOrFakeQuantize):
        return Bias(module, source) if own else Fixed(observer)
    if source.op == "get_attr":
        weight = isinstance(observer, observers.WeightObserver | observers.PerChannelWeightObserver)
        return Weights(observer, module, source) if own and weight else Fixed(observer)
    seen = isinstance(observer, observers.Watched) and bool(observer.min_val <= observer.max_val)
    return Values(observer) if seen else Fixed(observer)


def put(module: GraphModule, target: str, part: torch.nn.Module) -> None:
    """Let the node of that target call `part`; the module has to be recompiled after the last."""
    owner, _, leaf = target.rpartition(".")
    setattr(module.get_submodule(owner), leaf, part)


class _Rounded(torch.autograd.Function):
    """scale * clamp(round(x / scale), low, high), with gradients in both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
        step = float(scale)
        whole = (x * (1.0 / step)).round_().clamp_(low, high)
        ctx.save_for_backward(x, whole)
        ctx.how = step, low, high
        return whole * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, whole), (step, low, high) = ctx.saved_tensors, ctx.how
        passed = torch.ops.aten.hardtanh_backward(gradient, x, (low - 0.5) * step, (high + 0.5) * step)
        return passed, (gradient * whole).sum() - (passed * x).sum() / step, None, None


class _Passed(torch.autograd.Function):
    """`rounded` in the place of x, with x's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
