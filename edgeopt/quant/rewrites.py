"""The same operators in the form that a runtime has an integer kernel for."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.quant.annotations import ACTIVATIONS, CONVOLUTIONS, is_float_tensor, operator

_aten = torch.ops.aten
_POOLS = {1: _aten.avg_pool1d.default, 2: _aten.avg_pool2d.default, 3: _aten.avg_pool3d.default}
_ADAPTIVE = {"adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3}


def global_pooling(module: GraphModule) -> int:
    """The mean over all places of a picture, [N, C, ...], becomes average pooling over its size, in place; how many.

    torch's exporter writes both the mean and adaptive pooling to one place as ReduceMean, which onnxruntime runs in
    float; AveragePool becomes QLinearAveragePool. A picture of varying size has no such form and keeps the mean.
    """
    found = [node for node in module.graph.nodes if _is_mean_of_places(node) and _static_places(node)]
    for node in found:
        _replace(module, node)
    if found:
        module.recompile()
    return len(found)


def separate_biases(module: GraphModule, *, copied: bool) -> int:
    """A bias that several layers read is read by each for itself, in place; how many more there are.

    As an integer it has a scale of its own for each: input scale times weight scale. `copied` gives each a tensor of
    its own, so that one can be corrected without the others.
    """
    added = 0
    for bias in [node for node in module.graph.nodes if node.op == "get_attr" and len(node.users) > 1]:
        readers = [
            user for user in bias.users if operator(user) in (*CONVOLUTIONS, "linear") and user.args[2:3] == (bias,)
        ]
        for layer in readers[1:] if len(readers) == len(bias.users) else readers:
            if copied:
                own = stored.add_tensor(
                    module, str(bias.target), stored.tensor(module, bias).clone(), before=layer, trained=True
                )
            else:
                with module.graph.inserting_before(layer):
                    own = module.graph.get_attr(str(bias.target))
                own.meta = dict(bias.meta)
            layer.args = (*layer.args[:2], own, *layer.args[3:])
            added += 1
    if added:
        module.recompile()
    return added


def _static_places(node: Node) -> bool:
    return all(isinstance(size, int) for size in node.args[0].meta["val"].shape[2:])


def _is_mean_of_places(node: Node) -> bool:
    if operator(node) in _ADAPTIVE:
        sizes = node.args[1]
        batched = is_float_tensor(node.args[0]) and node.args[0].meta["val"].ndim == _ADAPTIVE[operator(node)] + 2
        return batched and all(size == 1 for size in (sizes if isinstance(sizes, list | tuple) else [sizes]))
    if node.target is not _aten.mean.dim or node.kwargs.get("dtype") is not None or not is_float_tensor(node.args[0]):
        return False
    rank, dims = node.args[0].meta["val"].ndim, node.args[1]
    if dims is None or sorted(dim % rank for dim in dims) != list(range(2, rank)):
        return False
    # of three axes the last may as well be the features of a token
    return rank in (4, 5) or (rank == 3 and _follows_conv1d(node.args[0]))


def _follows_conv1d(node: Node) -> bool:
    while operator(node) in (*ACTIVATIONS, "batch_norm", "leaky_relu", "silu", "gelu", "max_pool1d", "avg_pool1d"):
        node = node.args[0]
    return operator(node) == "conv1d"


def _replace(module: GraphModule, node: Node) -> None:
    source = node.args[0]
    sizes = list(source.meta["val"].shape[2:])
    keeps = operator(node) in _ADAPTIVE or (len(node.args) > 2 and node.args[2])
    with module.graph.inserting_before(node):
        pooled = module.graph.call_function(_POOLS[len(sizes)], (source, sizes))
        pooled.meta = dict(node.meta)
        new = pooled
        if not keeps:
            new = module.graph.call_function(_aten.flatten.using_ints, (pooled, 1))
            new.meta = dict(node.meta)
            pooled.meta["val"] = _with_ones(node.meta["val"], len(sizes))
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
    pooled.name = node.name  # by which `keep_float` may know it


def _with_ones(value: torch.Tensor, places: int) -> torch.Tensor:
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        return value.reshape(*value.shape, *[1] * places)
    with mode:
        return value.reshape(*value.shape, *[1] * places)
