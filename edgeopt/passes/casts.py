"""Which casts lose nothing, so that a cast back or onward gives what a single one would."""

from __future__ import annotations

import torch
from torch.fx import Node

from edgeopt.passes.layers import argument
from edgeopt.passes.scalars import value_of

_aten = torch.ops.aten
_CASTS = {_aten.to.dtype, _aten.to.dtype_layout, _aten._to_copy.default, _aten.type_as.default, _aten.to.other}
_MANTISSA = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
_EXPONENT = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8, torch.float64: 11}
_BITS = {  # of an integer's magnitude
    torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.int64: 63,
}  # fmt: skip


def is_cast(node: object) -> bool:
    """Whether `node` changes the dtype of a tensor and nothing else."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in _CASTS:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    if before is None or after is None or before.device != after.device:
        return False
    if node.target in (_aten.type_as.default, _aten.to.other):
        return True
    return argument(node, "memory_format") in (None, torch.preserve_format)


def lossless(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if narrow == wide:
        return True
    if narrow in _MANTISSA:
        return wide in _MANTISSA and _MANTISSA[narrow] <= _MANTISSA[wide] and _EXPONENT[narrow] <= _EXPONENT[wide]
    if narrow not in _BITS:
        return False
    if wide in _MANTISSA:
        return _BITS[narrow] <= _MANTISSA[wide] and (wide != torch.float16 or _BITS[narrow] <= 11)
    signed = narrow in (torch.int8, torch.int16, torch.int32, torch.int64)
    unsigned_target = wide in (torch.uint8, torch.bool)
    return wide in _BITS and _BITS[narrow] <= _BITS[wide] and not (signed and unsigned_target)
