"""What an operator gives for the fake tensors that every node of an exported graph carries."""

from __future__ import annotations

from typing import Any

import torch


def result(target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `target` gives for the fake values of nodes among its arguments; dynamic sizes stay expressions."""
    fakes = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = mode_of(fakes)
    if mode is None:
        return target(*fakes[0], **fakes[1])
    with mode, torch.no_grad():
        return target(*fakes[0], **fakes[1])


def mode_of(values: Any) -> Any:
    """The fake mode of the first fake tensor in nested `values`, or None."""
    for leaf in torch.utils._pytree.tree_leaves(values):
        mode = getattr(leaf, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def sizes(value: torch.Tensor) -> list[int]:
    """The shape of a fake tensor, with the size that the export was made with for each that varies."""
    return [size if isinstance(size, int) else size.node.hint or 1 for size in value.shape]
