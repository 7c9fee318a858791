"""Explicit zero padding moved into the convolution that reads it.

A convolution pads with zeros itself, so conv(pad(x, p)) = conv(x) with its padding larger by p, where p is the same
before and after each dimension: aten's convolutions know no other. A pad that stays is an operator of its own, in
float between two integer convolutions.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes.changed import Changed, Context

_aten = torch.ops.aten
_SPATIAL = {_aten.conv1d.default: 1, _aten.conv2d.default: 2, _aten.conv3d.default: 3}
_PADDING = 4  # position of `padding` among a convolution's arguments


def run(context: Context) -> Changed:
    module, mutated, count, declined = context.module, context.mutated, 0, []
    for conv in list(module.graph.nodes):
        pad = conv.args[0] if conv.target in _SPATIAL else None
        if not isinstance(pad, Node) or pad.target not in (_aten.pad.default, _aten.constant_pad_nd.default):
            continue
        reason = _reason_against(conv, pad, mutated)
        if reason:
            declined.append(f"{pad.name}: {reason}")
        else:
            _move(conv, pad)
            count += 1
    return Changed(count, tuple(declined))


def _reason_against(conv: Node, pad: Node, mutated: set[Node]) -> str | None:
    amounts = pad.args[1]
    if not all(isinstance(amount, int) for amount in amounts):
        return "its amounts depend on a size"
    if fill(pad) != 0:
        return f"it pads with {fill(pad)}"
    if pad.args[0] in mutated or pad in mutated:
        return "the model writes to what it pads"
    before, after = amounts[0::2], amounts[1::2]
    if before != after:
        return "it pads one side more than the other, which aten's convolutions cannot"
    if any(amount < 0 for amount in amounts):
        return "it crops"
    spatial = _SPATIAL[conv.target]
    if any(before[spatial:]):
        return "it pads batch or channels"
    if pad.args[0].meta["val"].dim() != spatial + 2:
        return "the convolution has no batch axis"
    return None


def fill(pad: Node) -> object:
    """The value padded with; the mode's name where it is no constant."""
    if pad.target is _aten.pad.default:
        mode = pad.kwargs.get("mode", pad.args[2] if len(pad.args) > 2 else "constant")
        if mode != "constant":
            return mode
        value = pad.kwargs.get("value", pad.args[3] if len(pad.args) > 3 else None)
        return 0 if value is None else value
    return pad.kwargs.get("value", pad.args[2] if len(pad.args) > 2 else 0)


def _move(conv: Node, pad: Node) -> None:
    spatial = _SPATIAL[conv.target]
    amounts = list(reversed(pad.args[1][0::2]))  # pad names the last dimension first
    amounts = [0] * (spatial - len(amounts)) + amounts[-spatial:]
    own = list(conv.args[_PADDING]) if len(conv.args) > _PADDING else [0]
    own = own * spatial if len(own) == 1 else own
    args = list(conv.args)
    args += [None, [1], [0]][len(args) - 2 :] if len(args) <= _PADDING else []
    args[0] = pad.args[0]
    args[_PADDING] = [a + b for a, b in zip(own, amounts, strict=True)]
    conv.args = tuple(args)
