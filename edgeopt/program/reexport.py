"""A graph exported again where torch cannot prove what its own bookkeeping of strides assumes of the sizes.

Casts and quantize operators on a tensor with a size such as W // 2, which torch takes to be 1 perhaps, get strides
from which a following flatten derives conditions like `1 % (W // 2) != 0`. They hold of the fake tensors' strides
only; torch cannot prove them over the axis's range, and gives the export up. Here they are deferred, taken out, and
the result is run at other sizes: it has to give what the graph gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def deferred(
    module: torch.fx.GraphModule, example: Sequence[torch.Tensor], dynamic_shapes: Any,
    others: Sequence[Sequence[torch.Tensor]],
) -> torch.export.ExportedProgram | None:  # fmt: skip
    """`module` exported without conditions on sizes; None where the result gives other outputs for `others`."""
    with torch.no_grad():
        made = torch.export.export(
            module, tuple(example), dynamic_shapes=dynamic_shapes, strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
        for node in list(made.graph.nodes):
            if node.target is torch.ops.aten._assert_scalar.default:
                made.graph.erase_node(node)
        made.graph.eliminate_dead_code()
        made.graph_module.recompile()
        again = made.module(check_guards=False)
        same = all(equal(module(*inputs), again(*inputs)) for inputs in others)
    return made if same else None


def equal(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors are the same in shape and in every value; NaN equals NaN."""
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=a.is_floating_point())
        for a, b in zip(wanted, got, strict=True)
    )
