"""The passes in their order. A pass is a function of a context (graph, profile, settings) that says what it changed.

Order matters: in-place operators become plain first, since everything after declines where memory is written;
no-ops go before folding, which looks at direct neighbours; dead code goes last, with the weights it leaves behind.
The user's own rules run where `RULES_AFTER` says, before the passes of whole graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgeopt.passes import (
    activations,
    aligned_channels,
    attention,
    batch_norm,
    channels_last,
    conv_affine,
    dead_code,
    dequantize_later,
    duplicates,
    fold_constants,
    frames,
    identities,
    in_place,
    inverse_pairs,
    layout,
    no_ops,
    norms,
    padding,
    parallel_matmuls,
    quantized,
    sum_of_matmuls,
)
from edgeopt.passes.changed import Changed, Context

RULES_AFTER = "no_ops"


@dataclass(frozen=True)
class Pass:
    """One line of the table.

    `graphs`: those that it is for, 'float' or 'integer' (with Q/DQ), or 'both'. `level`: what it looks at, as
    compilers say it. `settings`: the names that a user may set below `passes.NAME`, with their defaults. `on`: whether
    it runs unless it is switched. `made_by`: the library whose pass it is, where it is not ours.
    """

    name: str
    graphs: Literal["float", "integer", "both"]
    level: Literal["node", "block", "graph"]
    run: Callable[[Context], Changed]
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    on: bool = True
    made_by: str = "edgeopt"


PASSES: tuple[Pass, ...] = (
    Pass("out_of_place", "float", "node", in_place.run),
    Pass("no_ops", "both", "node", no_ops.run),
    Pass("identities", "float", "node", identities.run),
    Pass("inverse_pairs", "float", "node", inverse_pairs.run),
    Pass("attention", "float", "block", attention.run),
    Pass("gelu", "float", "block", activations.gelu),
    Pass("silu", "float", "block", activations.silu),
    Pass("layer_norm", "float", "block", norms.layer_norm),
    Pass("rms_norm", "float", "block", norms.rms_norm),
    Pass("conv_bn", "float", "graph", batch_norm.conv_bn),
    Pass("bn_conv", "float", "graph", batch_norm.bn_conv),
    Pass("pad_conv", "float", "graph", padding.run),
    Pass("sum_of_matmuls", "float", "graph", sum_of_matmuls.run, sum_of_matmuls.SETTINGS),
    Pass("parallel_matmuls", "float", "graph", parallel_matmuls.run, parallel_matmuls.SETTINGS),
    Pass("absorb_activation", "integer", "node", quantized.absorb_activation),
    Pass("dequantize_later", "integer", "node", dequantize_later.run),
    Pass("requantize", "integer", "node", quantized.requantize),
    Pass("fold_constants", "both", "graph", fold_constants.run, {"max_new_bytes": fold_constants.MAX_NEW_BYTES}),
    Pass("channel_order", "float", "graph", frames.channel_order),
    Pass("conv_affine", "float", "graph", conv_affine.run),
    Pass("cast_first", "float", "graph", frames.cast_first),
    Pass("duplicates", "both", "graph", duplicates.run),
    Pass("dead_code", "both", "graph", dead_code.run),
    Pass("aligned_channels", "float", "graph", aligned_channels.run, aligned_channels.SETTINGS, on=False),
    Pass("contiguous_weights", "both", "graph", layout.run),
    Pass("channels_last", "float", "graph", channels_last.run, channels_last.SETTINGS, on=False),
)
