"""A camera's bytes as the integers that the first convolution reads: its input is not quantized, and has no error.

Bytes x less a whole number m are integers of scale 1 and zero point m as they are: dequantize(x, 1, m) = x - m.
Where m differs by channel, with z a whole number near the mean of all, x - m = (x - z) + (z - m): the second part
goes into the convolution's bias, and its zeros beside the picture become bytes m beside it, rounded, so that only
there values are off, by at most half of a byte's step.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.program.new_nodes import call
from edgeopt.quant.annotations import argument, is_kept_float, is_weight, operator

_aten = torch.ops.aten
_BIAS, _PADDING, _GROUPS = 2, 4, 6  # positions among the arguments of aten's conv2d


def as_integers(module: GraphModule) -> int:
    """Let convolutions read bytes where their input is bytes, cast and shifted, in place; how many do."""
    found = 0
    for conv in list(module.graph.nodes):
        if conv.target is _aten.conv2d.default and not is_kept_float(conv) and is_weight(conv.args[1]):
            found += _as_integers(module, conv)
    if found:
        module.graph.eliminate_dead_code()
        module.recompile()
    return found


def _as_integers(module: GraphModule, conv: Node) -> bool:
    source, shift = conv.args[0], None
    if operator(source) == "sub" and len(source.args) == 2 and len(source.users) == 1:
        shift = stored.tensor_of(module, source.args[1])
        source = source.args[0] if shift is not None else source
    if source.target is not _aten.to.dtype or len(source.users) > 1 or len(conv.args[0].users) > 1:
        return False
    frames = source.args[0]
    if frames.meta["val"].dtype is not torch.uint8 or source.meta["val"].dtype is not torch.float32:
        return False
    if frames.meta["val"].dim() != 4:  # a convolution takes a picture without a batch too
        return False
    channels = frames.meta["val"].shape[1]
    means = torch.zeros(channels) if shift is None else _each_channel(shift, channels)
    if means is None or not bool(((means >= 0) & (means <= 255)).all()):
        return False
    if bool((means == means[0].round()).all()):
        _read(conv, frames, int(means[0]))
        return True
    centre = int(means.mean().round())
    padding = argument(conv, _PADDING) or [0, 0]
    if not all(isinstance(amount, int) for amount in padding):
        return False
    _shift_bias(module, conv, centre - means)
    if any(padding):
        frames = _padded(conv, frames, padding * 2 if len(padding) == 1 else padding, means)
        conv.args = (*conv.args[:_PADDING], [0, 0], *conv.args[_PADDING + 1 :])
    _read(conv, frames, centre)
    return True


def _each_channel(shift: torch.Tensor, channels: int) -> torch.Tensor | None:
    """The shift as (channels,) where it is one number for each, along axis 1, or one for all."""
    if shift.numel() == 1:
        return shift.reshape(1).expand(channels)
    own = tuple(shift.shape[-3:]) == (channels, 1, 1) and shift.numel() == channels
    return shift.reshape(channels) if own else None


def _read(conv: Node, frames: Node, zero_point: int) -> None:
    """`frames` as the convolution's integer input of scale 1."""
    operator_ = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    conv.args = (call(conv, operator_, frames, 1.0, zero_point, 0, 255, torch.uint8), *conv.args[1:])


def _shift_bias(module: GraphModule, conv: Node, shift: torch.Tensor) -> None:
    """What the convolution makes of an input of `shift` everywhere, put into its bias."""
    weight, bias = stored.tensor(module, conv.args[1]).double(), stored.tensor_of(module, argument(conv, _BIAS))
    groups = argument(conv, _GROUPS) or 1
    spread = shift.double().view(groups, -1).repeat_interleave(weight.shape[0] // groups, dim=0)
    made = (weight * spread.view(*spread.shape, 1, 1)).sum((1, 2, 3)) + (0 if bias is None else bias.double())
    name = f"{str(conv.args[1].target).rpartition('.')[0]}.bias_of_frames".lstrip(".")
    node = stored.add_tensor(module, name, made.float(), before=conv, trained=True)
    conv.args = (*conv.args[:_BIAS], node, *conv.args[_BIAS + 1 :])


def _padded(conv: Node, frames: Node, padding: list[int], means: torch.Tensor) -> Node:
    """The bytes with each channel's own mean around them."""
    high, wide = padding
    planes = []
    for c, mean in enumerate(means.tolist()):
        plane = call(conv, _aten.slice.Tensor, frames, 1, c, c + 1)
        planes.append(call(conv, _aten.constant_pad_nd.default, plane, [wide, wide, high, high], round(mean)))
    return call(conv, _aten.cat.default, planes, 1)
