"""custom_ops::fused_attention in Python: the quick way to an operator, and a reference for the one in ops.cpp.

torch.library.Library is there from torch 1.13 on, so this file loads on older devices, where
torch.library.custom_op (torch 2.4) is not. A process loads this file or the compiled library, never both.
"""

import torch

library = torch.library.Library("custom_ops", "DEF")
library.define("fused_attention(Tensor q, Tensor k, Tensor v) -> Tensor")


def fused_attention(q, k, v):
    """q [..., queries, width], k [..., keys, width], v [..., keys, value] -> [..., queries, value]."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).contiguous()


def without_data(q, k, v):
    """The result's shape and dtype, for torch.export."""
    return q.new_empty([*q.shape[:-1], v.shape[-1]])


library.impl("fused_attention", fused_attention, "CPU")
library.impl("fused_attention", fused_attention, "CUDA")
library.impl("fused_attention", without_data, "Meta")
