"""What depends on stored tensors alone, computed once. A size cap keeps the file from growing by it."""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule, Node

from edgeopt.passes.changed import Changed, Context
from edgeopt.program.qdq import is_dequantize
from edgeopt.program.stored import add_tensor, tensor_of

MAX_NEW_BYTES = 16 << 10  # of a result that is larger than the tensors that it replaces


def run(context: Context) -> Changed:
    module, mutated, cap = context.module, context.mutated, int(context.settings["max_new_bytes"])
    constant: set[Node] = set()
    declined = []
    for node in module.graph.nodes:
        if node.op == "get_attr" and tensor_of(module, node) is not None and node not in mutated:
            constant.add(node)
        elif _depends_on(node, constant) and node not in mutated:
            reason = _reason_against(node, cap)
            if reason:
                declined.append(f"{node.name}: {reason}")
            else:
                constant.add(node)
    return Changed(_materialise(module, constant), tuple(declined))


def _depends_on(node: Node, constant: set[Node]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if any(not isinstance(source, Node) or source not in constant for source in node.all_input_nodes):
        return False
    if is_dequantize(node):
        return False  # it stays, so that the runtime sees an integer weight
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _reason_against(node: Node, max_new_bytes: int) -> str | None:
    size = _bytes(node)
    if size is None:
        return "its result is no single tensor of fixed shape"
    replaced = sum(_bytes(source) or 0 for source in node.all_input_nodes if len(source.users) == 1)
    if size > max(max_new_bytes, replaced):
        return f"its result of {size} bytes would replace {replaced}"
    return None


def _bytes(node: Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return math.prod(value.shape) * value.element_size()


def _materialise(module: GraphModule, constant: set[Node]) -> int:
    """Replace each computed constant that something else reads by a stored tensor; how many nodes went."""
    computed = [n for n in module.graph.nodes if n in constant and n.op == "call_function"]
    values: dict[Node, torch.Tensor] = {}
    with torch.no_grad():
        for node in computed:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: _value(module, n, values))
            values[node] = node.target(*args, **kwargs)
    for node in computed:
        if any(user not in constant for user in node.users):
            stored = values[node].resolve_conj().resolve_neg().contiguous().clone()  # lazy bits are lost in files
            node.replace_all_uses_with(add_tensor(module, f"{node.name}_folded", stored, node, trained=False))
    for node in reversed(computed):
        module.graph.erase_node(node)
    return len(computed)


def _value(module: GraphModule, node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
    return values[node] if node in values else tensor_of(module, node)
