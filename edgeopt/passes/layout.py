"""Weights as contiguous tensors with storage of their own: kernels of some devices read strided ones wrongly."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from edgeopt.passes.changed import Changed
from edgeopt.spec.profile import Profile


def run(module: GraphModule, profile: Profile) -> Changed:
    del profile
    count = 0
    for tensor in (*module.parameters(), *module.buffers()):
        if not _is_plain(tensor):
            with torch.no_grad():
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
            count += 1
    return Changed(count)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
