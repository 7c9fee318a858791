"""Products and sums with one constant a channel folded into the layer after which, or before which, they stand.

Frozen BatchNorm, LayerScale, and the normalisation of images are written so; the arithmetic is in `affine`. It runs
after constants are folded, since such scales are computed from several tensors.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes import affine, layers
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.readers import New, Reader, absorbed, readers
from edgeopt.passes.target_torch import left_out


def run(context: Context) -> Changed:
    count, declined = 0, []
    for node in list(context.module.graph.nodes):
        found = _after(context, node)
        if isinstance(found, str):
            declined.append(f"{node.name}: {found}")
        elif found is not None:
            _put(context, node, node_instead=found[0].layer, changed=[found])
            count += 1
    for node in reversed(list(context.module.graph.nodes)):  # the last first: of a chain, each stands before a layer
        pairs = _before(context, node)
        if isinstance(pairs, str):
            declined.append(f"{node.name}: {pairs}")
        elif pairs is not None:
            source, pairs = pairs
            _put(context, node, node_instead=source, changed=pairs)
            count += 1
    return Changed(count, tuple(dict.fromkeys(declined)))


def _put(context: Context, node: Node, *, node_instead: Node, changed: list[tuple[Reader, New]]) -> None:
    for reader, new in changed:
        layers.set_weights(context.module, reader.layer, *new)
    node.replace_all_uses_with(node_instead)
    context.module.graph.erase_node(node)


def _after(context: Context, node: Node) -> tuple[Reader, New] | str | None:
    layer = next((n for n in node.all_input_nodes if layers.is_layer(n)), None)
    if layer is None:
        return None
    step = affine.of_elementwise(context, node, layers.channel_axis(layer))
    if step is None or isinstance(step, str) or step.source is not layer:
        return step if isinstance(step, str) else None
    pattern = "linear_bn" if layer.target in layers.LINEAR else "conv_bn"
    reason = left_out(context.profile, pattern) or _shared(context, node, layer)
    new = reason or affine.after(context, layer, step)
    return new if isinstance(new, str) else (Reader(layer), new)


def _before(context: Context, node: Node) -> tuple[Node, list[tuple[Reader, New]]] | str | None:
    found, axis = _readers(node)
    if not found:
        return None
    step = affine.of_elementwise(context, node, axis)
    if step is None or isinstance(step, str):
        return step
    if node in context.mutated or step.source in context.mutated:
        return "the model writes to what it reads or gives"
    taken = absorbed(context, found, step)
    return taken if isinstance(taken, str) else (step.source, taken)


def _readers(node: Node) -> tuple[list[Reader], int]:
    """The layers that read the node, and the axis of its channels; none where anything else reads it."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or not node.users:
        return [], 0
    if all(u.target in layers.LINEAR and u.args[0] is node and node not in u.args[1:] for u in node.users):
        return [Reader(user) for user in node.users], -1
    found = readers(node)
    return ([], 0) if isinstance(found, str) else (found, 1 - node.meta["val"].dim())


def _shared(context: Context, node: Node, layer: Node) -> str | None:
    if len(layer.users) > 1:
        return f"the result of {layer.name} has other users"
    if node in context.mutated or layer in context.mutated:
        return "the model writes to what it reads or gives"
    return None
