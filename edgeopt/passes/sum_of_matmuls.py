"""Sums of products as one product: x1 W1 + x2 W2 + ... = [x1 x2 ...] [W1; W2; ...].

With stored weights the right side is laid together now, and where two products read the same input their weights are
added, which always saves a product. With computed matrices both sides are laid together at run time, which gains only
from three products on: two would be two copies and a product instead of two products and a sum.

Measured on two x86 cores (torch 2.13, onnxruntime 1.32), best of 25 rounds, two and three linear layers: up to 16 rows
of 128 values TorchScript is 1.1 to 1.9 times as fast and onnxruntime 1.04 to 1.5 times; from some 50,000 copied values
on the two do not differ beyond the noise. Hence the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.passes import layers
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.scalars import same_type
from edgeopt.passes.target_torch import left_out
from edgeopt.program.stored import add_tensor, tensor_of

_aten = torch.ops.aten
PATTERN = "sum_of_matmuls"
MAX_COPIED_ELEMENTS = 32_768  # that laying inputs together copies in one call, dynamic axes left out
SETTINGS = {"max_copied_elements": MAX_COPIED_ELEMENTS}
_MATMUL = {_aten.matmul.default, _aten.mm.default, _aten.bmm.default}
_LEAST_COMPUTED = 3


@dataclass(frozen=True)
class _Sum:
    """A tree of additions that ends in `root`: products with stored weights, other products, and what else is added."""

    root: Node
    stored: tuple[Node, ...]
    computed: tuple[Node, ...]
    rest: tuple[Node, ...]
    inner: tuple[Node, ...]  # the additions below the root


def run(context: Context) -> Changed:
    count, declined = 0, []
    below: set[Node] = set()
    for node in reversed(list(context.module.graph.nodes)):
        if node in below or not _is_sum(node):
            continue
        found = _collect(context, node)
        below |= {*found.inner}
        if len(found.stored) < 2 and len(found.computed) < 2:
            continue
        reason = _reason_against(context, found)
        new = None if reason else _merged(context, found)
        if isinstance(new, Node):
            node.replace_all_uses_with(new)
            _erase(context, (node, *found.inner, *found.stored, *found.computed))
            count += 1
        else:
            declined.append(f"{node.name}: {reason or new}")
    return Changed(count, tuple(reversed(declined)))


def _is_sum(node: Node) -> bool:
    if node.op != "call_function" or node.target is not _aten.add.Tensor or layers.argument(node, "alpha") != 1:
        return False
    return all(isinstance(n, Node) and same_type(n, node) for n in node.args[:2])


def _collect(context: Context, root: Node) -> _Sum:
    stored, computed, rest, inner = [], [], [], []
    ahead = [*root.args[:2]]
    while ahead:
        node = ahead.pop(0)
        if len(node.users) > 1 or node.op != "call_function":
            rest.append(node)
        elif _is_sum(node):
            inner.append(node)
            ahead = [*node.args[:2], *ahead]
        elif _has_stored_weight(context, node):
            stored.append(node)
        elif node.target in _MATMUL and all(n.op != "get_attr" for n in node.args):
            computed.append(node)
        else:
            rest.append(node)
    return _Sum(root, tuple(stored), tuple(computed), tuple(rest), tuple(inner))


def _has_stored_weight(context: Context, node: Node) -> bool:
    if node.target is not _aten.linear.default and node.target not in _MATMUL:
        return False
    weight = tensor_of(context.module, node.args[1])
    bias = layers.bias_of(node)
    if weight is None or weight.dim() != 2 or node.args[0].op == "get_attr" or not weight.is_floating_point():
        return False
    return bias is None or tensor_of(context.module, bias) is not None


def _reason_against(context: Context, found: _Sum) -> str | None:
    if reason := left_out(context.profile, PATTERN):
        return reason
    products = (*found.stored, *found.computed)
    touched = [*products, *found.inner, *(n for p in products for n in p.all_input_nodes)]
    if any(node in context.mutated for node in touched):
        return "the model writes to what the products read or give"
    return None


def _merged(context: Context, found: _Sum) -> Node | str:
    """The node of the whole sum, or why no product can be saved."""
    terms, reason = _of_stored(context, found)
    others, reason_computed = _of_computed(context, found)
    if len(terms) + len(others) == len(found.stored) + len(found.computed):
        return reason or reason_computed
    terms += others + list(found.rest)
    total = terms[0]
    for term in terms[1:]:
        total = call(found.root, _aten.add.Tensor, (total, term), like=found.root)
    return total


def _of_stored(context: Context, found: _Sum) -> tuple[list[Node], str]:
    """Nodes whose sum is that of the products with stored weights, and why they are no fewer."""
    by_input: dict[Node, list[Node]] = {}
    for node in found.stored:
        by_input.setdefault(node.args[0], []).append(node)
    reason = _reason_against_laying(context, list(by_input))
    if not reason:
        return ([_laid(context, found.root, by_input)] if by_input else []), ""
    terms = [_laid(context, found.root, {x: ps}) if len(ps) > 1 else ps[0] for x, ps in by_input.items()]
    return terms, reason


def _reason_against_laying(context: Context, inputs: list[Node]) -> str:
    if len(inputs) < 2:
        return ""
    shapes = [n.meta["val"].shape for n in inputs]
    if len({tuple(str(s) for s in shape[:-1]) for shape in shapes}) > 1:
        return "the inputs differ in more than their last axis"
    return _too_large(context, sum(_static(shape) for shape in shapes))


def _laid(context: Context, root: Node, by_input: dict[Node, list[Node]]) -> Node:
    """One linear layer: its weight the inputs' weights side by side, each the sum over the products of that input."""
    products = [p for of_one in by_input.values() for p in of_one]
    weights = [sum(_outputs_first(context, p) for p in of_one) for of_one in by_input.values()]
    biases = [tensor_of(context.module, b).double() for p in products if (b := layers.bias_of(p)) is not None]
    dtype, name = tensor_of(context.module, products[0].args[1]).dtype, layers.own_name(products[0].args[1].target)
    weight = torch.cat(weights, 1).to(dtype)
    inputs = list(by_input)
    x = inputs[0] if len(inputs) == 1 else call(root, _aten.cat.default, (inputs, -1), like=products[0])
    args = [x, add_tensor(context.module, f"{name}weight_summed", weight, root, trained=True)]
    if biases:
        args.append(add_tensor(context.module, f"{name}bias_summed", sum(biases).to(dtype), root, trained=True))
    return call(root, _aten.linear.default, tuple(args), like=products[0])


def _outputs_first(context: Context, product: Node) -> torch.Tensor:
    weight = tensor_of(context.module, product.args[1]).double()
    return weight if product.target is _aten.linear.default else weight.t()


def _of_computed(context: Context, found: _Sum) -> tuple[list[Node], str]:
    """Nodes whose sum is that of the products of computed matrices, and why they are no fewer."""
    products = list(found.computed)
    if len(products) < _LEAST_COMPUTED:
        return products, f"{len(products)} products of computed matrices: laying them together costs as much"
    left = [p.args[0] for p in products]
    right = [p.args[1] for p in products]
    shapes = [n.meta["val"].shape for n in (*left, *right)]
    if min(len(shape) for shape in shapes) < 2 or len({tuple(str(s) for s in shape[:-2]) for shape in shapes}) > 1:
        return products, "the matrices' batch axes differ"
    reason = _too_large(context, sum(_static(shape) for shape in shapes))
    if reason:
        return products, reason
    a = call(found.root, _aten.cat.default, (left, -1), like=products[0])
    b = call(found.root, _aten.cat.default, (right, -2), like=products[0])
    return [call(found.root, _aten.matmul.default, (a, b), like=products[0])], ""


def _static(shape: torch.Size) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


def _too_large(context: Context, elements: int) -> str:
    if elements <= context.settings["max_copied_elements"]:
        return ""
    return f"laying the inputs together copies {elements} values"


def _erase(context: Context, nodes: tuple[Node, ...]) -> None:
    """Erase those that nothing reads any more; each comes before what it reads."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            context.module.graph.erase_node(node)
