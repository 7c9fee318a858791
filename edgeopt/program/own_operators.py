"""Which operators of a graph are the user's own, told by their namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

# The namespaces that torch 2.13, torchao 0.18 and torchvision register, and edgeopt's.
NOT_OWN = {
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native", "_quantized", "_test",
    "aten", "c10d", "c10d_functional", "cplib", "debug_mode_ops", "debugprims", "edgeopt", "edgeopt_parts", "export",
    "flex_lib", "float8_sparse", "fsdp", "higher_order", "inductor", "inductor_prims", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "prim", "prims", "profiler", "quantization", "quantized",
    "quantized_decomposed", "rngprims", "sparse", "static_runtime", "streams", "symm_mem", "torchao", "torchvision",
}  # fmt: skip


def is_own(target: Any) -> bool:
    """Whether `target` is an operator of the user's own."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in NOT_OWN


def own_nodes(module: GraphModule) -> Iterator[Node]:
    """The nodes of the graph and of the graphs in it that call operators of the user's own."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from (node for node in part.graph.nodes if node.op == "call_function" and is_own(node.target))


def own_names(module: GraphModule) -> tuple[str, ...]:
    """Their names, namespace::operator, in the order of their first call."""
    return tuple(dict.fromkeys(node.target._schema.name for node in own_nodes(module)))
