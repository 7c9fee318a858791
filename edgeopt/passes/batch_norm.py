"""BatchNorm with fixed statistics folded into the convolution or linear layer before it.

y = gamma (w x + b - mean) / sqrt(var + eps) + beta is the same layer with w' = s w and b' = s (b - mean) + beta,
s = gamma / sqrt(var + eps) for each output channel. Taken in float64 and rounded once. torch's own
`fuse_conv_bn_weights` scales the wrong channels of a transposed convolution with groups.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.constants import add_tensor, tensor_of

_aten = torch.ops.aten
_CONV = {
    _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default,
    _aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding,
}  # fmt: skip
_TRANSPOSED = {_aten.conv_transpose1d.default, _aten.conv_transpose2d.input, _aten.conv_transpose3d.input}
_LINEAR = {_aten.linear.default}
_TRANSPOSED_GROUPS = 6  # position of `groups` among the arguments of a transposed convolution


def run(context: Context) -> Changed:
    module, mutated, count, declined = context.module, context.mutated, 0, []
    for norm in list(module.graph.nodes):
        if norm.target is not _aten.batch_norm.default:
            continue
        reason = _reason_against(module, norm, mutated, context.profile.fusion.patterns)
        if reason:
            declined.append(f"{norm.name}: {reason}")
        else:
            _fold(module, norm)
            count += 1
    return Changed(count, tuple(declined))


def _reason_against(module: GraphModule, norm: Node, mutated: set[Node], patterns: tuple[str, ...]) -> str | None:
    layer, gamma, beta, mean, var, training = norm.args[:6]
    if training or mean is None or var is None:
        return "it normalises with the statistics of the batch"
    if not isinstance(layer, Node) or layer.target not in _CONV | _TRANSPOSED | _LINEAR:
        return f"no convolution or linear layer before it, but {getattr(layer, 'name', layer)}"
    pattern = "linear_bn" if layer.target in _LINEAR else "conv_bn"
    if pattern not in patterns:
        return f"the profile's fusion.patterns leave out {pattern}"
    if len(layer.users) > 1:
        return f"the result of {layer.name} has other users"
    constants = [n for n in (*layer.args[1:3], gamma, beta, mean, var) if isinstance(n, Node)]
    if any(tensor_of(module, n) is None for n in constants):
        return f"the weights of {layer.name} or its own are computed"
    if any(n in mutated for n in constants):
        return "the model writes to its weights"
    weight, shape = tensor_of(module, layer.args[1]), layer.meta["val"].shape
    if len(shape) != weight.dim():  # the channel that batch_norm means is then not the layer's
        return f"{layer.name} works on {len(shape)} dimensions, where axis 1 is not its output"
    if not all(torch.isfinite(x).all() for x in _folded(module, norm)):
        return "the folded weights would not be finite"
    return None


def _folded(module: GraphModule, norm: Node) -> tuple[torch.Tensor, torch.Tensor]:
    layer = norm.args[0]
    weight = tensor_of(module, layer.args[1])
    bias, gamma, beta, mean, var = (
        None if node is None else tensor_of(module, node).double()
        for node in (layer.args[2] if len(layer.args) > 2 else None, *norm.args[1:5])
    )
    scale = torch.rsqrt(var + norm.args[7])
    if gamma is not None:
        scale = scale * gamma
    shift = (0 if bias is None else bias) - mean
    shift = shift * scale if beta is None else shift * scale + beta
    return (weight.double() * _along_outputs(layer, weight, scale)).to(weight.dtype), shift.to(weight.dtype)


def _along_outputs(layer: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`scale` of shape (outputs,) in a shape that multiplies each output channel of `weight`."""
    rest = [1] * (weight.dim() - 2)
    if layer.target not in _TRANSPOSED:
        return scale.view(-1, 1, *rest)
    groups = layer.args[_TRANSPOSED_GROUPS] if len(layer.args) > _TRANSPOSED_GROUPS else 1
    inputs_per_group = weight.shape[0] // groups  # a transposed weight is (inputs, outputs / groups, ...)
    return scale.view(groups, -1).repeat_interleave(inputs_per_group, dim=0).view(weight.shape[0], -1, *rest)


def _fold(module: GraphModule, norm: Node) -> None:
    layer = norm.args[0]
    name = layer.args[1].target.removesuffix("weight")
    weight, bias = _folded(module, norm)
    args = list(layer.args) + [None] * (3 - len(layer.args))
    args[1] = add_tensor(module, f"{name}weight_folded", weight, layer, trained=True)
    args[2] = add_tensor(module, f"{name}bias_folded", bias, layer, trained=True)
    layer.args = tuple(args)
    norm.replace_all_uses_with(layer)
    module.graph.erase_node(norm)
