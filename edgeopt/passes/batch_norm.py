"""BatchNorm with fixed statistics folded into the layer after which, or before which, it stands.

The arithmetic is in `affine`. torch's own `fuse_conv_bn_weights` scales the wrong channels of a transposed
convolution with groups, and other tools fold a shift into a convolution that pads with zeros.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes import affine, layers
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.readers import Reader, absorbed, readers
from edgeopt.passes.target_torch import left_out

_aten = torch.ops.aten


def conv_bn(context: Context) -> Changed:
    """A BatchNorm after a layer goes into it."""
    count, declined = 0, []
    for norm in _norms(context):
        layer = norm.args[0]
        new = _after(context, norm)
        if isinstance(new, str):
            declined.append(f"{norm.name}: {new}")
        else:
            layers.set_weights(context.module, layer, *new)
            norm.replace_all_uses_with(layer)
            context.module.graph.erase_node(norm)
            count += 1
    return Changed(count, tuple(declined))


def bn_conv(context: Context) -> Changed:
    """A BatchNorm before layers goes into each of them, the last first, so that one before another follows it."""
    count, declined = 0, []
    for norm in reversed(_norms(context)):
        found = _before(context, norm)
        if isinstance(found, str):
            declined.append(f"{norm.name}: {found}")
            continue
        for reader, new in found:
            layers.set_weights(context.module, reader.layer, *new)
        norm.replace_all_uses_with(norm.args[0])
        context.module.graph.erase_node(norm)
        count += 1
    return Changed(count, tuple(reversed(declined)))


def _norms(context: Context) -> list[Node]:
    return [node for node in context.module.graph.nodes if node.target is _aten.batch_norm.default]


def _after(context: Context, norm: Node) -> tuple[torch.Tensor, torch.Tensor | None] | str:
    layer = norm.args[0]
    step = affine.of_batch_norm(context, norm)
    if isinstance(step, str):
        return step
    if not layers.is_layer(layer):
        return f"no convolution or linear layer before it, but {getattr(layer, 'name', layer)}"
    pattern = "linear_bn" if layer.target in layers.LINEAR else "conv_bn"
    if reason := left_out(context.profile, pattern):
        return reason
    if len(layer.users) > 1:
        return f"the result of {layer.name} has other users"
    shape = layer.meta["val"].shape
    if len(shape) != layers.tensor_dims(layer):  # the channel that batch_norm means is then not the layer's
        return f"{layer.name} works on {len(shape)} dimensions, where axis 1 is not its output"
    return affine.after(context, layer, step)


def _before(context: Context, norm: Node) -> list[tuple[Reader, tuple]] | str:
    """Each layer that reads the BatchNorm with its new weights, or why the BatchNorm stays."""
    step = affine.of_batch_norm(context, norm)
    if isinstance(step, str):
        return step
    if norm in context.mutated or norm.args[0] in context.mutated:
        return "the model writes to what it reads or gives"
    found = readers(norm)
    return found if isinstance(found, str) else absorbed(context, found, step)
