"""BatchNorms that are left in front of quantization become part of the layer before them.

A runtime has no integer BatchNorm, so one that stands after an integer layer would cost a float operator between two
integer ones. Its statistics are fixed in a captured graph: y = scale x + shift with scale = gamma / sqrt(var + eps)
and shift = beta - mean scale, which is exact with the model's own eps. torchao would fold it too, but writes over a
weight that two layers share, and in training puts eps 1e-5 and momentum 0.1 in the place of the model's (torchao
issues 4107 and 2980). A BatchNorm that cannot be folded stays as it is, with its constants, in float, and torchao does
not get to see it: where there is one at all, it traces some seventy patterns, which takes a minute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.program.patterns import aten_name
from edgeopt.quant.annotations import is_kept_float

_DIMS = {"conv1d": 3, "conv2d": 4, "conv3d": 5, "linear": 2}
_TRANSPOSED = {"conv_transpose1d": 3, "conv_transpose2d": 4, "conv_transpose3d": 5}
_GROUPS = 6  # position among the arguments of a transposed convolution


def fold(module: GraphModule) -> int:
    """Fold every BatchNorm that follows a convolution or linear layer alone, in place; how many went."""
    norms = [n for n in module.graph.nodes if aten_name(n) == "batch_norm" and _dims(n.args[0])]
    folded = [norm for norm in norms if _foldable(module, norm)]
    for norm in folded:
        _fold(module, norm)
    if folded:
        module.graph.eliminate_dead_code()
        module.recompile()
    return len(folded)


def hide(module: GraphModule) -> None:
    """Call the BatchNorms that are left by a function that torchao does not know, in place, until `show`."""
    _replace(module, torch.ops.aten.batch_norm.default, _batch_norm)


def show(module: GraphModule) -> None:
    """The BatchNorms as operators again."""
    _replace(module, _batch_norm, torch.ops.aten.batch_norm.default)


def _replace(module: GraphModule, old: object, new: Callable) -> None:
    found = [node for node in module.graph.nodes if node.target is old]
    for node in found:
        node.target = new
    if found:
        module.recompile()


def _batch_norm(*args: object) -> torch.Tensor:
    return torch.ops.aten.batch_norm.default(*args)


def _dims(layer: object) -> int | None:
    """Dimensions of the input of a layer that takes in a BatchNorm over axis 1."""
    return {**_DIMS, **_TRANSPOSED}.get(aten_name(layer)) if isinstance(layer, Node) else None


def _foldable(module: GraphModule, norm: Node) -> bool:
    layer, gamma, beta, mean, var, training = norm.args[:6]
    if is_kept_float(norm) or training or len(layer.users) > 1 or layer.meta["val"].ndim != _dims(layer):
        return False
    own = [layer.args[1], *layer.args[2:3]]
    return mean is not None and all(n is None or stored.is_stored(module, n) for n in (gamma, beta, mean, var, *own))


def _fold(module: GraphModule, norm: Node) -> None:
    layer, *constants = norm.args[:5]
    gamma, beta, mean, var = (None if n is None else stored.tensor(module, n).double() for n in constants)
    scale = torch.rsqrt(var + norm.args[7])
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    weight = stored.tensor(module, layer.args[1])
    bias = layer.args[2] if len(layer.args) > 2 else None
    if bias is not None:
        shift = shift + stored.tensor(module, bias).double() * scale
    new = (weight.double() * _along_outputs(layer, weight, scale)).to(weight.dtype)
    name = str(layer.args[1].target)
    bias_name = str(bias.target) if bias is not None else f"{name.rpartition('.')[0]}.bias".lstrip(".")
    layer.args = (
        layer.args[0],
        _put(module, layer, name, new),
        _put(module, layer, bias_name, shift.to(weight.dtype)),
        *layer.args[3:],
    )
    norm.replace_all_uses_with(layer)
    module.graph.erase_node(norm)


def _along_outputs(layer: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[outputs] in a shape that multiplies each output channel; a transposed weight is [in, out / groups, ...]."""
    ones = [1] * (weight.ndim - 2)
    if aten_name(layer) not in _TRANSPOSED:
        return scale.reshape(-1, 1, *ones)
    groups = layer.args[_GROUPS] if len(layer.args) > _GROUPS else 1
    spread = scale.reshape(groups, -1).repeat_interleave(weight.shape[0] // groups, dim=0)
    return spread.reshape(weight.shape[0], -1, *ones)


def _put(module: GraphModule, layer: Node, name: str, value: torch.Tensor) -> Node:
    """A parameter that holds `value`, under `name` where nothing but `layer` reads what stood there."""
    if stored.users(module, name) == {layer}:
        stored.remove(module, name)
    return stored.add_tensor(module, name, value, before=layer, trained=True)
