"""The state_dict of a prepared module, put back as it was."""

from __future__ import annotations

from collections import OrderedDict

import torch


def load(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """`module.load_state_dict(state)`, for a state that went through a file or a copy; RuntimeError where it misfits.

    torch keeps the versions of modules beside a state_dict, in an attribute that plain dicts lose. Without it torchao
    takes the state for one of its oldest and resets each observer's `eps`, the least scale, to its default.
    """
    versioned = OrderedDict(state)
    versioned._metadata = module.state_dict()._metadata
    module.load_state_dict(versioned)
