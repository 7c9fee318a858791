"""Rules of convolutions for OpenVINO, whose kernels give float as cheaply as integers.

Read from the graphs that OpenVINO 2026.4 executes of small files (x86 with AMX): a quantize behind a convolution, and a
smooth activation or a residual sum before that quantize, becomes part of the convolution's kernel; so does nothing
where no integer kernel reads the result. There a pair costs a Convert, an Eltwise and a Reorder. A transposed
convolution runs on integers where input and weight are quantized.
"""

from __future__ import annotations

from torch.fx import Node

from edgeopt.quant.annotations import ACTIVATIONS, CONVOLUTIONS, TRANSPOSED, annotate_output, is_kept_float, operator
from edgeopt.quant.rules_products import inputs_only
from edgeopt.quant.rules_values import AVERAGE_POOLING, LAYOUT, MAX_POOLING, SPLITS
from edgeopt.quant.scheme import Scheme

_TAKE = (*CONVOLUTIONS, *TRANSPOSED, "linear", "add")
_HAND_ON = (
    *LAYOUT, *MAX_POOLING, *AVERAGE_POOLING, *SPLITS, "mean", "amax", "getitem", "cat", "concat", "concatenate",
)  # fmt: skip


def convolution(node: Node, scheme: Scheme) -> str | None:
    """Input and weight; the result too where what reads it runs on integers."""
    refused = inputs_only(node, scheme)
    if refused is None and _is_read_as_integers(_end(node)):
        annotate_output(node, scheme)
    return refused


def _end(node: Node) -> Node:
    """The activation behind `node` that the range of its result absorbs, else `node`."""
    users = list(node.users)
    return users[0] if len(users) == 1 and operator(users[0]) in ACTIVATIONS else node


def _is_read_as_integers(node: Node) -> bool:
    """Whether integers of `node` reach a kernel that multiplies or adds them, over what moves or averages them."""
    seen, waiting = set(), [node]
    while waiting:
        for user in waiting.pop().users:
            if user in seen or is_kept_float(user):
                continue
            seen.add(user)
            if operator(user) in _TAKE:
                return True
            if operator(user) in _HAND_ON:
                waiting.append(user)
    return False
