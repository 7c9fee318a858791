"""Operands of a concatenation whose ranges are near its result's take over the result's scale.

onnxruntime's QLinearConcat copies an operand that has the result's scale and looks every value up in a table where it
has another. Equal scales cost steps: an operand whose range is half as wide would lose one of its 8 bits. So a
scale is shared where at most an eighth of the steps is lost, and only by operands that nothing else reads as integers.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from edgeopt.program.qdq import is_dequantize, is_quantize
from edgeopt.quant.annotations import operator

NEAR = 8 / 7  # result's scale / operand's scale
_CONCAT = ("cat", "concat", "concatenate")


def share_near_scales(module: GraphModule) -> int:
    """Share scales in a converted graph, in place; how many operands changed theirs."""
    changed = 0
    for node in module.graph.nodes:
        result = _only_quantize(node) if operator(node) in _CONCAT else None
        if result is None:
            continue
        for part in dict.fromkeys(node.args[0]):
            changed += _take_over(part, node, result)
    if changed:
        module.recompile()
    return changed


def _only_quantize(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_quantize(users[0]) else None


def _take_over(part: Node, concat: Node, result: Node) -> bool:
    quantize = part.args[0] if is_dequantize(part) else None
    if not is_quantize(quantize) or quantize.target is not result.target:
        return False
    readers = {user for dequantize in quantize.users for user in dequantize.users}
    theirs, shared = quantize.args[1:], result.args[1:]
    if readers != {concat} or theirs == shared or theirs[2:] != shared[2:] or not _is_near(theirs, shared):
        return False
    for node in (quantize, *quantize.users):
        node.args = (node.args[0], *shared[:2], *node.args[3:])
    return True


def _is_near(theirs: tuple, shared: tuple) -> bool:
    """Whether the result's range holds the operand's, and is not much wider."""
    (scale, zero, low, high), (wide, wide_zero) = theirs[:4], shared[:2]
    if not (isinstance(scale, float) and isinstance(wide, float)) or wide > NEAR * scale:
        return False
    least, most = (low - zero) * scale, (high - zero) * scale
    return (low - wide_zero) * wide <= least + wide and most - wide <= (high - wide_zero) * wide
