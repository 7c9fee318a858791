"""Products of two batches of matrices, in their spellings: matmul, bmm, baddbmm, einsum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.passes.changed import Context
from edgeopt.passes.layers import argument
from edgeopt.passes.scalars import number, sizes

_aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """scale * left @ right + added; `transposed`: the last two axes of `right` change places before."""

    left: Node
    right: Node
    scale: float = 1.0
    added: Node | None = None
    transposed: bool = False


def of(context: Context, node: object) -> Product | None:
    """The node as a product of matrices along its last two axes, None where it is no such thing."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in (_aten.matmul.default, _aten.bmm.default):
        return Product(*node.args[:2]) if min(len(sizes(n) or ()) for n in node.args[:2]) > 2 else None
    if node.target is _aten.baddbmm.default:
        return _of_baddbmm(context, node)
    return _of_einsum(node) if node.target is _aten.einsum.default else None


def _of_baddbmm(context: Context, node: Node) -> Product | None:
    alpha, beta = argument(node, "alpha"), argument(node, "beta")
    added = node.args[0]
    if beta == 0 or number(context, added) == 0:
        added = None
    elif beta != 1:
        return None
    return Product(node.args[1], node.args[2], float(alpha), added) if isinstance(alpha, int | float) else None


def _of_einsum(node: Node) -> Product | None:
    """'bid,bjd->bij' and 'bij,bjd->bid', with any batch letters in front, the same in all three."""
    equation, operands = node.args[:2]
    terms = equation.replace(" ", "").replace("...", "*").replace("->", ",").split(",")
    if len(terms) != 3 or len(operands) != 2 or any(len(term) < 3 for term in terms):
        return None
    (left, right, result), batch = terms, terms[0][:-2]
    if not left[:-2] == right[:-2] == result[:-2] or len(set(left)) != len(left) or set(batch) & set(right[-2:]):
        return None
    i, k = left[-2:]
    if result[-2] != i or result[-1] in (i, k):
        return None
    if right[-2:] == k + result[-1]:
        return Product(*operands)
    return Product(*operands, transposed=True) if right[-2:] == result[-1] + k else None
