"""A module of positional tensors to a flat tuple of tensors, which is what exporters and tracers take."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from edgeopt.capture.eager import Eager, flatten


def flat(model: Eager, *, copy_inputs: bool) -> nn.Module:
    """A fresh copy of the model with a forward of positional tensors in the order of its inputs.

    The forward itself is replaced rather than wrapped, so that parameters keep the user's names. `copy_inputs`
    for a model that writes to its inputs: the captured program then writes to copies. Frames of a camera become what
    the model takes inside of it.
    """
    module = model.fresh()
    call = module.forward
    places = {}
    for at, spec in enumerate(model.inputs):
        if spec.name in model.cameras:
            places[at] = f"edgeopt_frames_{at}"
            module.add_module(places[at], model.cameras[spec.name].module())

    def forward(self: nn.Module, *tensors: torch.Tensor) -> Any:
        given = [t.clone() for t in tensors] if copy_inputs else list(tensors)
        for at, name in places.items():
            given[at] = getattr(self, name)(given[at])
        named, _ = flatten(call(**model.arguments.of(given)))
        return tuple(named.values())

    module.forward = types.MethodType(forward, module)
    return module
