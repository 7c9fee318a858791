"""Which nodes may share memory, and which of them are written to: what makes a rewrite of a node unsafe.

An operator's schema says which arguments it writes to and which its results may alias. Composite operators may
return an argument without saying so (dropout in eval mode, type_as), so they count as aliases of their arguments
unless they are known to compute a new tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, Node

from edgeopt.passes.connected import connected

_aten = torch.ops.aten

_FRESH = {
    _aten.conv1d, _aten.conv2d, _aten.conv3d, _aten.conv_transpose1d, _aten.conv_transpose2d, _aten.conv_transpose3d,
    _aten.batch_norm, _aten.instance_norm, _aten.layer_norm, _aten.group_norm, _aten.rms_norm,
    _aten.linear, _aten.matmul, _aten.bilinear, _aten.embedding, _aten.lstm, _aten.gru, _aten.lstm_cell, _aten.gru_cell,
    _aten.relu6, _aten.selu, _aten.prelu, _aten.softmax, _aten.log_softmax, _aten.scaled_dot_product_attention,
    _aten.max_pool1d, _aten.max_pool2d, _aten.max_pool3d, _aten.avg_pool1d, _aten.adaptive_avg_pool1d,
    _aten.adaptive_avg_pool2d, _aten.adaptive_avg_pool3d, _aten.one_hot, _aten.pad,
}  # fmt: skip  # pad of nothing clones


def written(node: Node) -> list[Node]:
    """The argument nodes that the node's operator writes to."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[Node] = []
    for argument, value in _schema_arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _nodes(value)
    return found


def groups(nodes: Iterable[Node]) -> dict[Node, int]:
    """A number for each of the nodes, which are in the graph's order, equal for nodes that may share memory."""
    first_read: dict[str, Node] = {}

    def near(node: Node) -> list[Node]:
        if node.op == "get_attr":  # two reads of one buffer are one tensor
            return [first_read.setdefault(node.target, node)]
        return may_alias(node)

    return {node: number for number, group in enumerate(connected(nodes, near)) for node in group}


def mutated(graph: Graph) -> set[Node]:
    """Every node whose memory some operator of the graph may write to."""
    group = groups(graph.nodes)
    hit = {group[target] for node in graph.nodes for target in written(node)}
    return {node for node in graph.nodes if group[node] in hit}


def may_alias(node: Node) -> list[Node]:
    if node.op != "call_function":
        return list(node.all_input_nodes) if node.op == "call_module" else []
    target = node.target
    if target is operator.getitem:
        return list(node.all_input_nodes)
    if not isinstance(target, torch._ops.OpOverload):
        return list(node.all_input_nodes)
    declared = [n for argument, value in _schema_arguments(node) if argument.alias_info for n in _nodes(value)]
    if declared or target.overloadpacket in _FRESH:
        return declared
    return list(node.all_input_nodes) if _is_composite(target) else []


def _is_composite(target: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def _schema_arguments(node: Node) -> Iterator[tuple[torch.Argument, object]]:
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args):
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: object) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [item for item in value if isinstance(item, Node)] if isinstance(value, list | tuple) else []
