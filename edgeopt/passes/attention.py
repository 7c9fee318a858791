"""Attention written out, softmax(q k^T scale + mask) v, as the operator scaled_dot_product_attention.

Kernels for the whole never store the scores, whose size is the square of the length. ONNX has no such operator before
opset 23: there it is written out again by program/written_out.py, with no more nodes than before. So it is only put
into a graph for a backend that runs it, TorchScript, of a torch that has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from edgeopt.passes import fusing, permutations, products, target_torch
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.fakes import call
from edgeopt.passes.layers import argument
from edgeopt.passes.rewrite import Rule
from edgeopt.passes.scalars import dtype, number, sizes
from edgeopt.program import masks

_aten = torch.ops.aten
_MUL, _DIV = {_aten.mul.Tensor, _aten.mul.Scalar}, {_aten.div.Tensor, _aten.div.Scalar}
_WHERE = {_aten.where.self, _aten.where.ScalarSelf, _aten.where.ScalarOther}
_MASKED_FILL = {_aten.masked_fill.Scalar, _aten.masked_fill.Tensor}
_SOFTMAX = {_aten.softmax.int}
_LEAST = -1e30  # adding this to a score gives this: half of its last place is far above any score
_FAR = -1e4  # a score this far below another is 0 after softmax


def run(context: Context) -> Changed:
    return fusing.apply(context, (Rule("attention", _find, _reason_against, _write),), merging=False)


@dataclass
class _Found:
    """What is read from the last operator down. The key is `keys` with its axes in `order`.

    `added`: masks that are added to the scores. `filled`: masks in whose place a number stands for the score; the
    flag says whether True is what is masked.
    """

    query: Node
    keys: Node
    value: Node
    order: tuple[int, ...] = ()
    scale: float = 1.0
    added: list[Node] = field(default_factory=list)
    filled: list[tuple[Node, float, bool]] = field(default_factory=list)
    inside: list[Node] = field(default_factory=list)
    unless: str | None = None


def _find(context: Context, node: Node) -> _Found | None:
    product = products.of(context, node)
    softmax = product.left if product else None
    if softmax is None or softmax.target not in _SOFTMAX or product.scale != 1 or product.added is not None:
        return None
    found = _Found(softmax, softmax, product.right, inside=[softmax])
    scores = _scores(context, softmax.args[0], found)
    if scores is not None:
        _read_operands(context, scores, found)
        rank = len(sizes(softmax))
        if argument(softmax, "dim") % rank != rank - 1:
            found.unless = "its softmax runs over another dimension than the product"
        if argument(softmax, "dtype") not in (None, dtype(scores)):
            found.unless = f"its softmax computes in {argument(softmax, 'dtype')}"
        if product.transposed:
            found.unless = "its values are transposed"
    return found if scores is not None or found.unless else None


def _scores(context: Context, node: Node, found: _Found) -> Node | None:
    """Down from the softmax through masks and scales to the product of query and key."""
    while isinstance(node, Node) and products.of(context, node) is None:
        found.inside.append(node)
        below = _masked(context, node, found) or _scaled(context, node, found)
        if below is None and _scaled_by_tensor(context, node):
            found.unless = "its scores are multiplied by a tensor"
        node = below
    if node is not None:
        found.inside.append(node)
    return node


def _masked(context: Context, node: Node, found: _Found) -> Node | None:
    """The scores below a mask; what is scaled after the mask has its number scaled."""
    if node.target in _MASKED_FILL:
        fill = number(context, node.args[2])
        if fill is not None:
            found.filled.append((node.args[1], fill * found.scale, True))
            return node.args[0]
    if node.target in _WHERE:
        for scores, other, masked in ((node.args[1], node.args[2], False), (node.args[2], node.args[1], True)):
            fill = number(context, other)
            if fill is not None and isinstance(scores, Node):
                found.filled.append((node.args[0], fill * found.scale, masked))
                return scores
    if node.target is _aten.add.Tensor and argument(node, "alpha") == 1 and isinstance(node.args[1], Node):
        for scores, mask in (node.args[:2], node.args[1::-1]):
            if _leads_to_product(context, scores):
                _add_mask(mask, found)
                return scores
    return None


def _add_mask(mask: Node, found: _Found) -> None:
    if found.scale != 1.0:
        found.unless = "its mask is scaled with the scores"
    found.added.append(mask)


def _leads_to_product(context: Context, node: object, depth: int = 4) -> bool:
    while isinstance(node, Node) and depth and products.of(context, node) is None:
        depth -= 1
        node = node.args[0] if node.target in _MUL | _DIV | _MASKED_FILL | {_aten.add.Tensor} else None
    return products.of(context, node) is not None


def _scaled(context: Context, node: Node, found: _Found) -> Node | None:
    """What is below a multiplication or division by a number."""
    if node.target not in _MUL | _DIV or node.kwargs.get("rounding_mode"):
        return None
    pairs = (node.args[:2], node.args[1::-1]) if node.target in _MUL else (node.args[:2],)
    for below, factor in pairs:
        value = number(context, factor)
        if isinstance(below, Node) and value:
            found.scale *= value if node.target in _MUL else 1 / value
            return below
    return None


def _scaled_by_tensor(context: Context, node: Node) -> bool:
    if node.target not in _MUL | _DIV or not isinstance(node.args[1], Node):
        return False
    return any(_leads_to_product(context, source) for source in node.args[:2])


def _read_operands(context: Context, scores: Node, found: _Found) -> None:
    """Query and key below their own scales; the key in the order that the operator takes."""
    product = products.of(context, scores)
    if product.added is not None:
        _add_mask(product.added, found)
    found.scale *= product.scale
    found.query = _unscaled(context, product.left, found)
    keys = _unscaled(context, product.right, found)
    order = tuple(range(len(sizes(keys))))
    if not product.transposed:
        order = permutations.swapped(order, -2, -1)
        before = permutations.of(keys)
        if before is not None:
            order = permutations.composed(before, order)
            if all(user in found.inside for user in keys.users):
                found.inside.append(keys)
            keys = _unscaled(context, keys.args[0], found)
    found.keys, found.order = keys, order


def _unscaled(context: Context, node: Node, found: _Found) -> Node:
    """What is below multiplications by numbers that nobody else reads."""
    while all(user in found.inside for user in node.users):
        below = _scaled(context, node, found)
        if below is None:
            break
        found.inside.append(node)
        node = below
    return node


def _reason_against(context: Context, node: Node, found: _Found) -> str | None:
    if found.unless:
        return found.unless
    if "torchscript" not in context.profile.backends:
        return "no backend of the profile has the operator, and ONNX writes it out again"
    given = (found.query, found.keys, found.value, *found.added, *(mask for mask, _, _ in found.filled))
    named = "scaled_dot_product_attention" + ("" if _is_default(found) else " with a scale")
    return (
        fusing.tied(context, node, found.inside, given)
        or _unless_shapes(node, found)
        or _unless_mask(context, found)
        or target_torch.left_out(context.profile, "attention")
        or target_torch.lacks(context.profile, named)
    )


def _is_default(found: _Found) -> bool:
    width = sizes(found.query)[-1]
    return width.isdigit() and math.isclose(found.scale, int(width) ** -0.5, rel_tol=1e-7)


def _unless_shapes(node: Node, found: _Found) -> str | None:
    query, keys, value, result = (sizes(n) for n in (found.query, found.keys, found.value, node))
    key = tuple(keys[i] for i in found.order)
    if not len(query) == len(key) == len(value) in (3, 4):
        return "query, key and value are not of 3 or 4 dimensions each"
    if not query[:-2] == key[:-2] == value[:-2] == result[:-2]:
        return "query, key and value are broadcast"
    if len({dtype(n) for n in (found.query, found.keys, found.value, node)}) != 1:
        return "query, key and value are of several dtypes"
    if not dtype(node).is_floating_point or found.scale <= 0:
        return "its scale is no positive number"
    return None


def _unless_mask(context: Context, found: _Found) -> str | None:
    if len(found.added) + len(found.filled) > 1:
        return "it has several masks"
    for mask in (*found.added, *(mask for mask, _, _ in found.filled)):
        if len(sizes(mask)) < 2 or len(sizes(mask)) > len(sizes(found.query)):
            return "its mask has too few or too many dimensions"
    for mask in found.added:
        if dtype(mask) != dtype(found.query):
            return "its mask is of another dtype"
        if not masks.leaves_a_key(context.module, mask, "added"):
            return "its mask may leave a query no key, where the model gives NaN and the operator 0"
    for mask, fill, masked in found.filled:
        never_whole = fill <= _FAR and _leaves_a_key(context, mask, masked)
        absorbs = _LEAST >= fill > -math.inf and dtype(found.query) == torch.float32
        if not never_whole and not absorbs:
            return f"its mask may leave a query no key, which {fill} for its scores does not make 0"
    return None


def _leaves_a_key(context: Context, mask: Node, masked: bool) -> bool:
    return masks.leaves_a_key(context.module, mask, "masked" if masked else "allowed")


def _write(context: Context, node: Node, found: _Found) -> Node:
    key = found.keys
    if found.order != tuple(range(len(found.order))):
        target, rest = permutations.operator(found.order)
        key = call(node, target, (key, *rest), like=node)
    mask = _mask(context, node, found)
    args = (found.query, key, found.value, *(() if mask is None else (mask,)))
    kwargs = {} if _is_default(found) else {"scale": found.scale}
    new = call(node, _aten.scaled_dot_product_attention.default, args, kwargs, like=node)
    new.meta["val"] = node.meta["val"]
    return new


def _mask(context: Context, node: Node, found: _Found) -> Node | None:
    for mask in found.added:
        return mask
    for mask, fill, masked in found.filled:
        if fill <= _FAR and _leaves_a_key(context, mask, masked):
            return call(node, _aten.logical_not.default, (mask,), like=node) if masked else mask
        on, off = (fill, 0.0) if masked else (0.0, fill)
        return call(node, _aten.where.Scalar, (mask, on, off), like=node)
    return None
