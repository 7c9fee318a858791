"""What multiplies and shifts each channel by constants, y = scale x + shift, and its absorption by a layer.

A BatchNorm with fixed statistics is scale = gamma / sqrt(var + eps), shift = beta - mean scale; products and sums with
stored tensors or numbers are the same without the names (frozen BatchNorm, LayerScale, normalised images).

After a layer: w' = scale w and b' = scale b + shift along the outputs. Before a layer: w' = w scale along the inputs
and b' = b + w shift, which is right only where the layer adds no zeros around its input: those stay zeros, and are
not shift.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from edgeopt.passes import layers
from edgeopt.passes.changed import Context
from edgeopt.passes.scalars import same_type
from edgeopt.program.stored import tensor_of

_aten = torch.ops.aten
_ELEMENTWISE = {
    _aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.div.Tensor, _aten.rsub.Scalar, _aten.rsub.Tensor,
    _aten.neg.default,
}  # fmt: skip


@dataclass(frozen=True)
class Affine:
    """y = scale x + shift; x is what `source` gives, scale and shift are float64 of shape (channels,)."""

    source: Node
    scale: torch.Tensor
    shift: torch.Tensor


def of_batch_norm(context: Context, norm: Node) -> Affine | str:
    """What a batch_norm does to axis 1, or why that is not known before it runs."""
    source, gamma, beta, mean, var, training = norm.args[:6]
    if training or mean is None or var is None:
        return "it normalises with the statistics of the batch"
    constants = [n for n in (gamma, beta, mean, var) if isinstance(n, Node)]
    if any(tensor_of(context.module, n) is None for n in constants):
        return "its weights are computed"
    if any(n in context.mutated for n in constants):
        return "the model writes to its weights"
    gamma, beta, mean, var = (
        None if n is None else tensor_of(context.module, n).double() for n in (gamma, beta, mean, var)
    )
    scale = torch.rsqrt(var + layers.argument(norm, "eps"))
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale
    return Affine(source, scale, shift if beta is None else shift + beta)


def of_elementwise(context: Context, node: Node, axis: int) -> Affine | str | None:
    """What a product or sum with a constant does along `axis`, counted from the end; None where it is no such thing."""
    if node.op != "call_function" or node.target not in _ELEMENTWISE:
        return None
    source, constant, first = _operands(context.module, node)
    if source is None:
        return None
    if not same_type(source, node):
        return "its result has another shape or dtype than what it reads"
    if constant in context.mutated:
        return "the model writes to its constant"
    channels = source.meta["val"].shape[axis]
    if not isinstance(channels, int):
        return "the number of channels is not known"
    value = _per_channel(context.module, constant, channels, axis)
    if value is None:
        return "its constant differs within a channel"
    return _affine(node, source, value, first)


def _operands(module: GraphModule, node: Node) -> tuple[Node | None, object, bool]:
    """(what is computed, the constant, whether the constant comes first); no first where there is no such pair."""
    if node.target is _aten.neg.default:
        return node.args[0], -1, False
    a, b = node.args[:2]
    if _is_constant(module, b) and isinstance(a, Node) and not _is_constant(module, a):
        return a, b, False
    if _is_constant(module, a) and isinstance(b, Node):
        return b, a, True
    return None, None, False


def _is_constant(module: GraphModule, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Node):
        return isinstance(value, int | float) and not isinstance(value, bool)
    tensor = tensor_of(module, value)
    return tensor is not None and tensor.dtype != torch.bool and not tensor.is_complex()


def _per_channel(module: GraphModule, constant: object, channels: int, axis: int) -> torch.Tensor | None:
    """The constant as (channels,), where it is one number for each channel or one for all."""
    value = tensor_of(module, constant) if isinstance(constant, Node) else torch.tensor(constant)
    value = value.double()
    own = value.dim() + axis  # the channels' axis among those that the constant has
    if value.numel() == 1:
        return value.reshape(1).expand(channels)
    if own < 0 or value.numel() != channels or value.shape[own] != channels:
        return None
    return value.reshape(channels)


def _affine(node: Node, source: Node, value: torch.Tensor, first: bool) -> Affine | str:
    one, none = torch.ones_like(value), torch.zeros_like(value)
    if node.target in (_aten.mul.Tensor, _aten.neg.default):
        return Affine(source, value, none)
    if node.target is _aten.div.Tensor:
        return "it divides by what is computed" if first else Affine(source, 1 / value, none)
    alpha = layers.argument(node, "alpha")
    if node.target is _aten.add.Tensor:
        return Affine(source, one * alpha, value) if first else Affine(source, one, value * alpha)
    minuend_first = first if node.target is _aten.sub.Tensor else not first  # rsub(a, b) is b - alpha a
    return Affine(source, one * -alpha, value) if minuend_first else Affine(source, one, value * -alpha)


def after(context: Context, layer: Node, step: Affine) -> tuple[torch.Tensor, torch.Tensor | None] | str:
    """The layer's weights with `step` after it inside, in float64; or why not."""
    reason = layers.reason_against_weights(context.module, layer, context.mutated)
    if reason:
        return reason
    weight, bias = layers.weights_of(context.module, layer)
    shift = step.shift if bias is None else bias * step.scale + step.shift
    new = weight * layers.along_outputs(layer, weight, step.scale), shift
    keeps_none = bias is None and not step.shift.any()  # a product alone needs no bias
    return _finite(context, layer, new[0], None if keeps_none else new[1])


def before(context: Context, layer: Node, step: Affine) -> tuple[torch.Tensor, torch.Tensor | None] | str:
    """The layer's weights with `step` before it inside, in float64; or why not."""
    reason = layers.reason_against_weights(context.module, layer, context.mutated)
    if reason is None and step.shift.any():
        reason = layers.uneven_borders(layer)
    if reason:
        return reason
    weight, bias = layers.weights_of(context.module, layer)
    new = weight * layers.along_inputs(layer, weight, step.scale)
    if step.shift.any():
        bias = layers.of_constant_input(layer, weight, step.shift) + (0 if bias is None else bias)
    return _finite(context, layer, new, bias)


def _finite(
    context: Context, layer: Node, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None] | str:
    dtype = tensor_of(context.module, layer.args[1]).dtype
    if all(torch.isfinite(t.to(dtype)).all() for t in (weight, bias) if t is not None):
        return weight, bias
    return "the folded weights would not be finite"
