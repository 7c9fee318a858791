"""Small products of one input with several stored weights as one product, then split: query, key and value.

x W1, x W2, x W3 = split(x [W1 W2 W3]). It saves calls and costs a split, whose parts are views in torch and copies in
onnxruntime. Three products on two x86 cores (torch 2.13, onnxruntime 1.32), best of 25 rounds: TorchScript is 1.1 to
1.3 times as fast for weights from 32 x 32 to 256 x 256; onnxruntime is as fast for up to 16 rows and takes 4 to 13 %
longer from 64 rows on. Larger weights showed nothing beyond the noise. Hence the limits.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from edgeopt.passes import aliases, layers
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.target_torch import left_out
from edgeopt.passes.views import BY_STRIDES, make_any_strides, views_below
from edgeopt.program.stored import add_tensor, tensor_of

_aten = torch.ops.aten
PATTERN = "parallel_matmuls"
MAX_WEIGHT_ELEMENTS = 196_608  # of all weights of a group together
MAX_ROWS = 16  # of the input, its dynamic axes left out
SETTINGS = {"max_weight_elements": MAX_WEIGHT_ELEMENTS, "max_rows": MAX_ROWS}
_PRODUCTS = {_aten.linear.default, _aten.matmul.default, _aten.mm.default}


def run(context: Context) -> Changed:
    count, declined = 0, []
    for group in _groups(context):
        reason = _reason_against(context, group)
        if reason:
            declined.append(f"{', '.join(node.name for node in group)}: {reason}")
        else:
            _merge(context, group)
            count += len(group)
    return Changed(count, tuple(declined))


def _groups(context: Context) -> list[list[Node]]:
    """Products with stored weights of one input, at least two together; those that can be one are together."""
    found: dict[tuple, list[Node]] = {}
    for node in _read(context):
        if node.op != "call_function" or node.target not in _PRODUCTS or not isinstance(node.args[0], Node):
            continue
        weight = tensor_of(context.module, node.args[1])
        if weight is None or weight.dim() != 2 or node.args[0].op == "get_attr":
            continue
        linear = node.target is _aten.linear.default
        found.setdefault((node.args[0], linear, weight.dtype), []).append(node)
    return [group for group in found.values() if len(set(map(_held, group))) > 1]


def _read(context: Context) -> list[Node]:
    """The nodes that something which stays reads: a product for nothing would only make the others larger."""
    kept: set[Node] = set()
    for node in reversed(context.module.graph.nodes):
        if node.op == "output" or node.is_impure() or aliases.written(node) or any(u in kept for u in node.users):
            kept.add(node)
    return [node for node in context.module.graph.nodes if node in kept]


def _reason_against(context: Context, group: list[Node]) -> str | None:
    if reason := left_out(context.profile, PATTERN):
        return reason
    weights = [tensor_of(context.module, node.args[1]) for node in group]
    biases = [layers.bias_of(node) for node in group]
    if len({bias is None for bias in biases}) > 1:
        return "some have a bias and some have none"
    if any(bias is not None and tensor_of(context.module, bias) is None for bias in biases):
        return "a bias is computed"
    held = [n for node, bias in zip(group, biases, strict=True) for n in (node.args[1], bias) if n is not None]
    if any(n in context.mutated for n in (*held, *group, group[0].args[0])):
        return "the model writes to what they read or give"
    if any(view.target in BY_STRIDES for node in group for view in views_below(node)):
        return "a result is read by its strides"
    size = sum(weight.numel() for weight in weights)
    if size > context.settings["max_weight_elements"]:
        return f"their weights are {size} values: a product of that size gains nothing from the others"
    rows = math.prod(s for s in group[0].args[0].meta["val"].shape[:-1] if isinstance(s, int))
    if rows > context.settings["max_rows"]:
        return f"{rows} rows: splitting the result costs more than a call less gains"
    return None


def _held(node: Node) -> tuple[Node, Node | None]:
    """Weight and bias: equal for products that are the same."""
    return node.args[1], layers.bias_of(node)


def _merge(context: Context, group: list[Node]) -> None:
    module, first = context.module, group[0]
    linear = first.target is _aten.linear.default
    distinct = list(dict.fromkeys(map(_held, group)))
    weights = [tensor_of(module, weight) for weight, _ in distinct]
    name = layers.own_name(first.args[1].target)
    weight = add_tensor(module, f"{name}weights", torch.cat(weights, 0 if linear else 1), first, trained=True)
    args = [first.args[0], weight]
    if layers.bias_of(first) is not None:
        bias = torch.cat([tensor_of(module, bias) for _, bias in distinct])
        args.append(add_tensor(module, f"{name}biases", bias, first, trained=True))
    sizes = [w.shape[0 if linear else 1] for w in weights]
    product = call(first, first.target, tuple(args), like=first)
    parts = call(first, _aten.split_with_sizes.default, (product, sizes, -1), like=first)
    items = [call(first, "getitem", (parts, i), like=first) for i in range(len(distinct))]
    for node in group:
        make_any_strides(node)  # a part is no contiguous tensor, of which every view could be taken
        node.replace_all_uses_with(items[distinct.index(_held(node))])
        module.graph.erase_node(node)
