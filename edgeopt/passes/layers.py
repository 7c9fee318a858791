"""Convolutions and linear layers as they stand in a graph: their channels, and their weights scaled along them.

A convolution's weight is (outputs, inputs / groups, kernel), a transposed one's (inputs, outputs / groups, kernel), a
linear layer's (outputs, inputs). Vectors over channels are float64; what is stored is rounded once.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.program.stored import add_tensor, tensor_of

_aten = torch.ops.aten
CONV = {
    _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default,
    _aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding,
}  # fmt: skip
TRANSPOSED = {_aten.conv_transpose1d.default, _aten.conv_transpose2d.input, _aten.conv_transpose3d.input}
LINEAR = {_aten.linear.default}
LAYERS = CONV | TRANSPOSED | LINEAR
_OWN_NAME = re.compile(r"weight(_folded(_\d+)?)?$")


def is_layer(node: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in LAYERS


def argument(node: Node, name: str) -> Any:
    """The argument of an aten operator by its name in the schema; its default where it is left out."""
    for i, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if i < len(node.args):
                return node.args[i]
            return node.kwargs.get(name, declared.default_value)
    raise KeyError(f"{node.target} has no argument '{name}'")


def bias_of(node: Node) -> Node | None:
    """The bias of a linear layer; None where it has none, and for other products."""
    return argument(node, "bias") if node.target in LINEAR else None


def channel_axis(layer: Node) -> int:
    """The axis of the result that the layer's outputs lie along, counted from the end."""
    return -1 if layer.target in LINEAR else 1 - tensor_dims(layer)


def tensor_dims(layer: Node) -> int:
    """Dimensions of the layer's weight, and of a batched input of a convolution."""
    return layer.args[1].meta["val"].dim()


def reason_against_weights(module: GraphModule, layer: Node, mutated: set[Node]) -> str | None:
    """Why the layer's weight and bias cannot be replaced by others, or None."""
    held = [n for n in (layer.args[1], argument(layer, "bias")) if n is not None]
    tensors = [tensor_of(module, n) for n in held]
    if any(t is None for t in tensors):
        return f"the weights of {layer.name} are computed"
    if not all(t.is_floating_point() for t in tensors):
        return f"the weights of {layer.name} are {str(tensors[0].dtype).removeprefix('torch.')}"
    if any(n in mutated for n in held):
        return f"the model writes to the weights of {layer.name}"
    return None


def groups(layer: Node) -> int:
    return 1 if layer.target in LINEAR else argument(layer, "groups")


def along_outputs(layer: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`scale` of shape (outputs,) in a shape that multiplies each output channel of `weight`."""
    rest = [1] * (weight.dim() - 2)
    if layer.target not in TRANSPOSED:
        return scale.view(-1, 1, *rest)
    inputs_per_group = weight.shape[0] // groups(layer)
    spread = scale.view(groups(layer), -1).repeat_interleave(inputs_per_group, dim=0)
    return spread.view(weight.shape[0], -1, *rest)


def along_inputs(layer: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`scale` of shape (inputs,) in a shape that multiplies each input channel of `weight`."""
    rest = [1] * (weight.dim() - 2)
    if layer.target in TRANSPOSED:
        return scale.view(-1, 1, *rest)
    outputs_per_group = weight.shape[0] // groups(layer)
    return scale.view(groups(layer), -1).repeat_interleave(outputs_per_group, dim=0).view(weight.shape[0], -1, *rest)


def of_constant_input(layer: Node, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What the layer without bias makes of `value` (inputs,), the same at every place: (outputs,).

    Right where `uneven_borders` has nothing against it.
    """
    product = weight * along_inputs(layer, weight, value)
    if layer.target not in TRANSPOSED:
        return product.flatten(1).sum(1)
    return product.view(groups(layer), -1, product[0].numel()).sum(1).flatten()


def uneven_borders(layer: Node) -> str | None:
    """Why a constant input would not give a constant result: zeros that the layer itself adds around its input."""
    if layer.target in LINEAR:
        return None
    kernel = layer.args[1].meta["val"].shape[2:]
    if layer.target in TRANSPOSED:
        plain = [1] * len(kernel)
        even = list(kernel) == plain and _each(layer, "stride") <= {1} and _each(layer, "output_padding") <= {0}
        return None if even else f"the places of {layer.name}'s result sum up different numbers of inputs"
    padding = argument(layer, "padding")
    if padding == "valid" or all(size == 1 for size in kernel) and padding == "same":
        return None
    if padding == "same" or _each(layer, "padding") != {0}:
        return f"{layer.name} pads with zeros"
    return None


def _each(layer: Node, name: str) -> set[Any]:
    value = argument(layer, name)
    return set(value) if isinstance(value, list | tuple) else {value}


def weights_of(module: GraphModule, layer: Node) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias in float64."""
    bias = tensor_of(module, argument(layer, "bias"))
    return tensor_of(module, layer.args[1]).double(), None if bias is None else bias.double()


def own_name(weight: str) -> str:
    """The name of a weight without its last word, to which that of a new tensor is added."""
    return _OWN_NAME.sub("", weight)


def set_weights(module: GraphModule, layer: Node, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The layer with new tensors, of its weight's dtype; the old ones stay for whoever else reads them."""
    name = own_name(layer.args[1].target)
    dtype = tensor_of(module, layer.args[1]).dtype
    args = list(layer.args) + [None] * (3 - len(layer.args))
    args[1] = add_tensor(module, f"{name}weight_folded", weight.to(dtype).contiguous(), layer, trained=True)
    if bias is not None:
        args[2] = add_tensor(module, f"{name}bias_folded", bias.to(dtype).contiguous(), layer, trained=True)
    layer.args = tuple(args)
    layer.kwargs = {key: value for key, value in layer.kwargs.items() if key != "bias"}
