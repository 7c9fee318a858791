"""What stands between a camera's frame and the first layer, put where it costs least.

Turned channels (BGR for RGB) before convolutions: conv_w(flip(x)) = conv_flip(w)(x), padding included, since zeros
turned are zeros. The normalisation behind is `conv_affine`'s. TensorRT takes bytes as a network's input from 8.5 on,
and does nothing with them but cast them (Developer Guide, kUINT8: for inputs and outputs), so for it the cast comes
first; elsewhere the frame is moved as bytes, a quarter of the memory.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes import layers, rewrite
from edgeopt.passes.casts import is_cast
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.readers import pads_in_space
from edgeopt.passes.rewrite import Rule
from edgeopt.program.stored import add_tensor, tensor_of

_aten = torch.ops.aten
_MOVES = {
    _aten.permute.default, _aten.transpose.int, _aten.index_select.default, _aten.flip.default, _aten.slice.Tensor,
}  # fmt: skip
_CONVOLUTIONS = layers.CONV | layers.TRANSPOSED


def channel_order(context: Context) -> Changed:
    """Turned channels into the order of the weights that read them; else they are turned as bytes, before the cast.

    Behind it then stands the normalisation, which a layer may still take in.
    """
    count, declined = 0, []
    for node in list(context.module.graph.nodes):
        if node.target is not _aten.flip.default or not _turns_channels(node):
            continue
        found = _convolutions(context, node)
        if isinstance(found, str):
            declined.append(f"{node.name}: {found}")
            count += _moved_up(context, node)
            continue
        for conv in found:
            weight, bias = layers.weights_of(context.module, conv)
            axis = 0 if conv.target in layers.TRANSPOSED else 1
            layers.set_weights(context.module, conv, weight.flip(axis), bias)
        node.replace_all_uses_with(node.args[0])
        context.module.graph.erase_node(node)
        count += 1
    return Changed(count, tuple(declined))


def _turns_channels(node: Node) -> bool:
    rank = node.meta["val"].dim()
    return rank > 2 and [dim % rank for dim in node.args[1]] == [1]


def _convolutions(context: Context, node: Node) -> list[Node] | str:
    """The convolutions that read `node`, pads of its places between; or why one of its readers is none."""
    if context.writes(node, *node.all_input_nodes):
        return "the model writes to what it reads or gives"
    found: list[Node] = []
    for user in node.users:
        if pads_in_space(user, node):
            below = _convolutions(context, user)
            if isinstance(below, str):
                return below
            found += below
            continue
        if user.target not in _CONVOLUTIONS or user.args[0] is not node or node in user.args[1:]:
            return f"no convolution after it, but {user.name}"
        if node.meta["val"].dim() != layers.tensor_dims(user):
            return f"axis 1 is no input channel of {user.name}"
        if layers.groups(user) != 1:
            return f"{user.name} takes its channels in groups"
        if reason := layers.reason_against_weights(context.module, user, context.mutated):
            return reason
        found.append(user)
    return found or "nothing reads it"


def _moved_up(context: Context, node: Node) -> bool:
    """The channels turned before what multiplies and shifts them, and before the cast; False where neither is there."""
    chain, at = [], node.args[0]
    while at.target in (_aten.sub.Tensor, _aten.mul.Tensor) and len(at.users) == 1 and _is_each_channel(context, at):
        chain.append(at)
        at = at.args[0]
    if is_cast(at) and len(at.users) == 1:
        chain.append(at)
    if not chain or context.writes(node, *chain):
        return False
    turned = call(chain[-1], node.target, (chain[-1].args[0], [1]), like=node)
    for step in chain:
        constant = tensor_of(context.module, step.args[1]) if len(step.args) > 1 else None
        rest = step.args[1:]
        if constant is not None and constant.numel() > 1:
            name = f"{step.args[1].target}_turned"
            rest = (add_tensor(context.module, name, constant.flip(-3), step), *rest[1:])
        step.args = (turned if step is chain[-1] else step.args[0], *rest)
    node.replace_all_uses_with(node.args[0])
    context.module.graph.erase_node(node)
    return True


def _is_each_channel(context: Context, step: Node) -> bool:
    """Whether the step's other operand is a stored number for each channel, or for all."""
    constant = tensor_of(context.module, step.args[1])
    if constant is None or len(step.args) > 2 or step.kwargs or step.args[1] in context.mutated:
        return False
    return constant.numel() == 1 or constant.dim() >= 3 and constant.shape[-3] == constant.numel()


def cast_first(context: Context) -> Changed:
    """Where TensorRT is among the backends: bytes cast as they come in, and moved after that."""
    if "tensorrt" not in context.profile.backends:
        return Changed(0)
    count, declined = 0, []
    while True:
        step = rewrite.apply(context, _CAST_FIRST)
        count += step.count
        declined += step.declined
        if not step.count:
            return Changed(count, tuple(dict.fromkeys(declined)))


def _find_moved(context: Context, node: Node) -> Node | None:
    if not is_cast(node) or node.target is not _aten.to.dtype or not node.meta["val"].is_floating_point():
        return None
    moved = node.args[0]
    if moved.target not in _MOVES or moved.meta["val"].dtype is not torch.uint8:
        return None
    return None if tensor_of(context.module, moved.args[0]) is not None else moved


def _against_moving(context: Context, node: Node, moved: Node) -> str | None:
    return context.writes(node, moved, moved.args[0])


def _moved_after(context: Context, node: Node, moved: Node) -> Node:
    source = moved.args[0]
    made = [n for n in source.users if n.target is node.target and n.args[1:] == node.args[1:] and n < node]
    cast = made[0] if made else call(source.next, node.target, (source, *node.args[1:]), node.kwargs, like=node)
    return call(node, moved.target, (cast, *moved.args[1:]), moved.kwargs, like=moved)


_CAST_FIRST = (Rule("cast first", _find_moved, _against_moving, _moved_after),)
