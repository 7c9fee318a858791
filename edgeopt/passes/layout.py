"""Weights as contiguous tensors with storage of their own: kernels of some devices read strided ones wrongly."""

from __future__ import annotations

import torch

from edgeopt.passes.changed import Changed, Context


def run(context: Context) -> Changed:
    module = context.module
    replaced: dict[int, torch.Tensor] = {}  # a tensor that two names share stays shared
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if _is_plain(tensor):
            continue
        if id(tensor) not in replaced:
            plain = tensor.detach().clone(memory_format=torch.contiguous_format)
            replaced[id(tensor)] = torch.nn.Parameter(plain) if isinstance(tensor, torch.nn.Parameter) else plain
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, replaced[id(tensor)])
    return Changed(len(replaced))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
