"""A converted graph made complete: weights stored as integers under the model's own names, and metadata everywhere.

torchao stores what it computes as `_frozen_param0`, `_scale_0` and so on. Here the integers of `features.0.weight` are
`features.0.weight`, where nothing reads the floats any more, beside `features.0.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.program.qdq import is_dequantize, is_quantize


def store_weights(module: GraphModule) -> int:
    """Compute every quantize of a stored tensor, in place; how many tensors became integers.

    One tensor that is quantized alike twice, by one name or by two (tied weights), is stored once.
    """
    kept: dict[tuple[Any, ...], str] = {}  # what was quantized, and how -> the name of the integers
    found = [n for n in module.graph.nodes if is_quantize(n) and stored.is_stored(module, n.args[0])]
    for quantize in found:
        _store(module, quantize, kept)
    module.graph.eliminate_dead_code()
    module.recompile()
    return len(kept)


def _store(module: GraphModule, quantize: Node, kept: dict[tuple[Any, ...], str]) -> None:
    source, how = quantize.args[0], quantize.args[1:]
    values = [stored.tensor(module, a) if stored.is_stored(module, a) else a for a in how]
    floats = stored.tensor(module, source)
    key = (floats.data_ptr(), floats.shape, floats.stride(), *map(_content, values))
    if key in kept:
        with module.graph.inserting_before(quantize):
            node = module.graph.get_attr(kept[key])
        node.meta["val"] = stored.fake(module.graph, stored.tensor(module, node))
    else:
        with torch.no_grad():
            integers = quantize.target(floats, *values).contiguous()
        name = str(source.target)
        if stored.users(module, name) == {quantize}:
            stored.remove(module, name)
        node = stored.add_tensor(module, name, integers, before=quantize)
        kept[key] = str(node.target)
    users = list(quantize.users)
    quantize.replace_all_uses_with(node)
    module.graph.erase_node(quantize)
    _name_parameters(module, kept[key], users)


def _content(value: Any) -> Any:
    return (tuple(value.shape), value.numpy().tobytes()) if isinstance(value, torch.Tensor) else repr(value)


def _name_parameters(module: GraphModule, name: str, dequantizes: list[Node]) -> None:
    """Scale and zero point of a stored weight under its own name, once for all that dequantize it."""
    for node in dequantizes:
        args = list(node.args)
        for i, what in ((1, "scale"), (2, "zero_point")):
            if not stored.is_stored(module, args[i]):
                continue
            wanted, value = f"{name}_{what}", stored.tensor(module, args[i])
            if _holds(module, wanted, value):
                with module.graph.inserting_before(node):
                    args[i] = module.graph.get_attr(wanted)
                args[i].meta["val"] = stored.fake(module.graph, value)
            else:
                args[i] = stored.add_tensor(module, wanted, value, before=node)
        node.args = tuple(args)


def _holds(module: GraphModule, name: str, value: torch.Tensor) -> bool:
    owner, _, leaf = name.rpartition(".")
    held = getattr(module.get_submodule(owner), leaf, None)
    return isinstance(held, torch.Tensor) and torch.equal(held, value)


def complete_metadata(module: GraphModule) -> None:
    """Give each quantize, dequantize and stored tensor the `val` that later passes and lowering read: shape, dtype."""
    for node in module.graph.nodes:
        if "val" in node.meta:
            continue
        if node.op == "get_attr" and stored.is_stored(module, node):
            node.meta["val"] = stored.fake(module.graph, stored.tensor(module, node))
        elif is_quantize(node) or is_dequantize(node):
            value = node.args[0].meta["val"]
            dtype = _dtype(node)
            mode = getattr(value, "fake_mode", None)
            if mode is None:
                node.meta["val"] = torch.empty_like(value, dtype=dtype)
            else:
                with mode:
                    node.meta["val"] = torch.empty_like(value, dtype=dtype)
            _take_origin(node)


def _dtype(node: Node) -> torch.dtype:
    if is_quantize(node):
        return node.args[-1]
    return node.kwargs.get("out_dtype") or torch.float32


def _take_origin(node: Node) -> None:
    """The module that a pair belongs to is that of what it quantizes, or of the first that reads it."""
    for near in (*_sources(node), *node.users):
        if "nn_module_stack" in near.meta:
            node.meta.setdefault("nn_module_stack", near.meta["nn_module_stack"])
            return


def _sources(node: Node) -> Iterator[Node]:
    source = node.args[0]
    while is_quantize(source) or is_dequantize(source):
        source = source.args[0]
    yield source
