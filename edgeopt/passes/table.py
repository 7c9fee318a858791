"""The passes in their order. A pass is a function of the graph and the profile that says what it changed.

Order matters: in-place operators become plain first, since everything after declines where memory is written;
no-ops go before folding, which looks at direct neighbours; dead code goes last, with the weights it leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch.fx import GraphModule

from edgeopt.passes import (
    batch_norm,
    dead_code,
    duplicates,
    fold_constants,
    in_place,
    layout,
    no_ops,
    padding,
    quantized,
)
from edgeopt.passes.changed import Changed
from edgeopt.spec.profile import Profile


@dataclass(frozen=True)
class Pass:
    """`level`: the graphs that it is for, 'float' or 'integer' (with Q/DQ), or 'both'."""

    name: str
    level: Literal["float", "integer", "both"]
    run: Callable[[GraphModule, Profile], Changed]


PASSES: tuple[Pass, ...] = (
    Pass("out_of_place", "float", in_place.run),
    Pass("no_ops", "both", no_ops.run),
    Pass("conv_bn", "float", batch_norm.run),
    Pass("pad_conv", "float", padding.run),
    Pass("requantize", "integer", quantized.requantize),
    Pass("fold_constants", "both", fold_constants.run),
    Pass("duplicates", "both", duplicates.run),
    Pass("dead_code", "both", dead_code.run),
    Pass("contiguous_weights", "both", layout.run),
)
