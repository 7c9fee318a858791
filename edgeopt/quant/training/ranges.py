"""The fake-quantizers of a module: when their ranges follow the data, when they stay, and whether they are all on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from edgeopt.quant import pt2e
from edgeopt.quant.training.ranks import Ranks


def fakes(module: torch.nn.Module) -> list[pt2e.FakeQuantizeBase]:
    """Each fake-quantizer once."""
    return [m for m in module.modules() if isinstance(m, pt2e.FakeQuantizeBase)]


@contextlib.contextmanager
def following(module: torch.nn.Module, ranks: Ranks) -> Iterator[None]:
    """Let the ranges follow in the block only. The graph itself has no mode: it was captured for inference."""
    for fake in fakes(module):
        fake.train()
        if ranks.size > 1 and not getattr(fake, "is_per_channel", False):
            fake.reduce = ranks.range  # weights are the same everywhere
    try:
        yield
    finally:
        for fake in fakes(module):
            fake.eval()
            fake.reduce = None


@contextlib.contextmanager
def still(module: torch.nn.Module) -> Iterator[None]:
    """No range follows in the block, within `following` too: to evaluate, or to look for a fault."""
    moving = [fake for fake in fakes(module) if fake.training]
    for fake in moving:
        fake.eval()
    try:
        yield
    finally:
        for fake in moving:
            fake.train()


def freeze(module: torch.nn.Module) -> None:
    """The ranges stay from now on, in training too."""
    for fake in fakes(module):
        fake.disable_observer()


def mixed(module: torch.nn.Module) -> tuple[str, ...]:
    """A warning where some values were trained without being fake-quantized: those ranges no training has felt."""
    found = fakes(module)
    off = [fake for fake in found if not bool(fake.fake_quant_enabled)]
    if not off:
        return ()
    watched = sum(bool(fake.observer_enabled) for fake in off)
    return (
        f"fake quantization was off at {len(off)} of {len(found)} places while training ended, {watched} of them with "
        "the observer on: the integer program rounds there, which nothing was trained for; call enable_fake_quant()",
    )
