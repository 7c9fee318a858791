"""Which layers read a tensor, where nothing but re-arrangement of its values within a channel stands between.

A pad by reflection, replication or wrapping copies values of the same channel, one by zeros lets scales pass, and a
flatten of all but the batch puts each channel's values side by side: what multiplies and shifts channels may move past
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from edgeopt.passes import affine, layers
from edgeopt.passes.affine import Affine
from edgeopt.passes.changed import Context
from edgeopt.passes.padding import fill
from edgeopt.passes.target_torch import left_out

_aten = torch.ops.aten
_COPYING = ("reflect", "replicate", "circular")

New = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias


@dataclass(frozen=True)
class Reader:
    """A layer that reads the tensor; `places` of its input channels belong to each channel of the tensor."""

    layer: Node
    places: int = 1
    zeros: bool = False  # whether zeros are padded on between, which a shift must not come past


def readers(node: Node) -> list[Reader] | str:
    """All readers of `node`, whose channels lie along axis 1; or the reason where one is no layer that takes them."""
    if not node.users:
        return "nothing reads it"
    found: list[Reader] = []
    for user in node.users:
        below = _through(node, user)
        if isinstance(below, str):
            return below
        found += below
    return found


def absorbed(context: Context, found: list[Reader], step: Affine) -> list[tuple[Reader, New]] | str:
    """The readers with the weights that take `step` before them in, or why one of them does not."""
    out = []
    for reader in found:
        if reader.zeros and step.shift.any():
            return f"zeros are padded on before {reader.layer.name}"
        pattern = "bn_linear" if reader.layer.target in layers.LINEAR else "bn_conv"
        spread = Affine(step.source, *(v.repeat_interleave(reader.places) for v in (step.scale, step.shift)))
        new = left_out(context.profile, pattern) or affine.before(context, reader.layer, spread)
        if isinstance(new, str):
            return new
        out.append((reader, new))
    return out


def _through(node: Node, user: Node) -> list[Reader] | str:
    rank = len(node.meta["val"].shape)
    if layers.is_layer(user):
        if user.args[0] is not node or node in user.args[1:]:
            return f"{user.name} reads it as a weight"
        if rank != layers.tensor_dims(user):
            return f"axis 1 of its {rank} dimensions is no input channel of {user.name}"
        return [Reader(user)]
    zeros = pads_in_space(user, node) and not _copies_within_channels(user, rank)
    places = 1 if zeros or _copies_within_channels(user, rank) else _flattened_places(node, user)
    if places is None:
        return f"no convolution or linear layer after it, but {user.name}"
    below = readers(user)
    if isinstance(below, str):
        return f"{user.name} is read by others: {below}"
    return [Reader(r.layer, r.places * places, r.zeros or zeros) for r in below]


def pads_in_space(user: Node, node: Node) -> bool:
    """Whether `user` pads the places of `node`, (N, C, ...), by zeros or by copies of values of the same channel."""
    if user.target not in (_aten.pad.default, _aten.constant_pad_nd.default) or user.args[0] is not node:
        return False
    rank = len(node.meta["val"].shape)
    return len(user.args[1]) <= 2 * (rank - 2) and (_copies_within_channels(user, rank) or fill(user) == 0)


def _copies_within_channels(user: Node, rank: int) -> bool:
    if user.target is not _aten.pad.default or len(user.args) < 3 or user.args[2] not in _COPYING:
        return False
    return len(user.args[1]) <= 2 * (rank - 2)


def _flattened_places(node: Node, user: Node) -> int | None:
    """Values a channel in a flatten of (N, C, ...) to (N, C ...); None where `user` is no such flatten."""
    if user.target not in (_aten.flatten.using_ints, _aten.view.default, _aten.reshape.default):
        return None
    before, after = node.meta["val"].shape, user.meta["val"].shape
    sizes = list(before[1:])
    if len(after) != 2 or str(after[0]) != str(before[0]) or not all(isinstance(size, int) for size in sizes):
        return None
    return math.prod(sizes[1:]) if str(after[1]) == str(math.prod(sizes)) else None
