"""Channels between two layers rounded up to what Tensor Cores take at once, with zeros.

Zero rows of one layer's weight and bias give channels that are constant, f(0) behind an element-wise f, and zero
columns of the next layer's weight take nothing from them: the result is the same to the last bit, the work grows.

Off unless asked for, since the libraries below the backends do it themselves where they gain: TensorRT's formats of
fp16 and int8 pad channels to 8 and 32 (its Python API, TensorFormat: HWC8 and CHW32), and cuDNN pads them from 7.6.3
on (NVIDIA's guide to convolutional layers, 'Channels In And Out'); every JetPack since 4.6 has cuDNN 8.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes import dead_code, fakes, layers
from edgeopt.passes.changed import Changed, Context
from edgeopt.spec.jetpack import version_tuple

_aten = torch.ops.aten
SETTINGS = {"multiple": 0}  # 0: 32 where int8 is allowed, else 8
_OLDEST_TENSOR_CORES = (7, 0)  # Volta
_POINTWISE = {  # finite at 0, one value from one
    _aten.relu, _aten.relu6, _aten.hardtanh, _aten.leaky_relu, _aten.elu, _aten.gelu, _aten.silu, _aten.mish,
    _aten.sigmoid, _aten.hardsigmoid, _aten.hardswish, _aten.tanh, _aten.max_pool2d, _aten.avg_pool2d,
    _aten.adaptive_avg_pool2d,
}  # fmt: skip
_POOLS = {_aten.max_pool2d, _aten.avg_pool2d, _aten.adaptive_avg_pool2d}


def run(context: Context) -> Changed:
    reason = _reason_of_target(context)
    if reason:
        return Changed(0, (reason,))
    multiple = context.settings["multiple"] or (32 if "int8" in context.profile.precision.allowed else 8)
    count, declined = 0, []
    for layer in list(context.module.graph.nodes):
        if not layers.is_layer(layer):
            continue
        channels = layer.meta["val"].shape[layers.channel_axis(layer)]
        if channels % multiple == 0:
            continue
        found = _found(context, layer)
        if isinstance(found, str):
            declined.append(f"{layer.name}: {channels} channels, {found}")
        else:
            _pad(context, layer, *found, -channels % multiple)
            count += 1
    if count:
        dead_code.run(context)
    return Changed(count, tuple(declined))


def _reason_of_target(context: Context) -> str | None:
    target, allowed = context.profile.target, set(context.profile.precision.allowed)
    if target.sm is None or version_tuple(target.sm) < _OLDEST_TENSOR_CORES:
        return "the target has no Tensor Cores"
    if not allowed & {"fp16", "bf16", "int8", "fp8"}:
        return "the profile allows no precision that Tensor Cores are for"
    return None


def _found(context: Context, layer: Node) -> tuple[list[Node], list[Node]] | str:
    """The operators between the layer and the layers that read it, and those; or why they have to stay."""
    between: list[Node] = []
    ends: list[Node] = []
    ahead = [layer]
    while ahead:
        at = ahead.pop()
        for user in at.users:
            packet = getattr(user.target, "overloadpacket", None)
            if layers.is_layer(user) and user.args[0] is at and at not in user.args[1:]:
                ends.append(user)
            elif packet in _POINTWISE and not (packet in _POOLS and layer.target in layers.LINEAR):
                between.append(user)
                ahead.append(user)
            else:
                return f"read by {user.name}"
    if not ends:
        return "which no layer reads"
    for node in (layer, *ends):
        if node.target in layers.TRANSPOSED or layers.groups(node) != 1:
            return f"{node.name} is transposed or has groups"
        reason = layers.reason_against_weights(context.module, node, context.mutated)
        if reason:
            return reason
    axes = {layers.channel_axis(node) for node in (layer, *ends)}
    if len(axes) > 1 or any(len(n.meta["val"].shape) < -layers.channel_axis(layer) for n in between):
        return "which are another axis for the layer that reads them"
    if any(node in context.mutated for node in (layer, *between)):
        return "which the model writes to"
    return between, ends


def _pad(context: Context, layer: Node, between: list[Node], ends: list[Node], more: int) -> None:
    weight, bias = layers.weights_of(context.module, layer)
    zeros = weight.new_zeros(more, *weight.shape[1:])
    layers.set_weights(
        context.module, layer, torch.cat([weight, zeros]),
        None if bias is None else torch.cat([bias, bias.new_zeros(more)]),
    )  # fmt: skip
    for end in ends:
        weight, bias = layers.weights_of(context.module, end)
        zeros = weight.new_zeros(weight.shape[0], more, *weight.shape[2:])
        layers.set_weights(context.module, end, torch.cat([weight, zeros], 1), bias)
    for node in sorted((layer, *between)):
        node.meta["val"] = fakes.result(node.target, node.args, node.kwargs)
