"""Channels made even before weights get one scale a tensor, so that no channel is left with a few of its steps.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.1: with
r1 and r2 the largest absolute weights that write and read a channel, both become sqrt(r1 r2) when the channel is
multiplied by sqrt(r2 / r1), and a positive factor passes through ReLU. It looks at weights only, so that it is done
alike before training, before the trained state is loaded again, and before calibration. BatchNorm folded into
the layer before it is what makes channels uneven; where a clamp follows, a factor would change the function, and such
channels are left alone.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from edgeopt.program import stored
from edgeopt.quant import channels
from edgeopt.quant.channels import Group

SWEEPS = 20  # over all groups: scaling one moves the ranges of its neighbours
EVEN = 1.01  # a factor nearer to 1 than this is not worth a sweep
MOST = 64.0  # largest factor in one sweep


def even(module: GraphModule) -> int:
    """Rescale channels in place where a layer writes and another reads them; how many groups of channels changed.

    The module computes the same function. Nodes need `meta['val']`.
    """
    found = [group for group in channels.groups(module) if not group.clamps]
    changed: set[int] = set()
    with torch.no_grad():
        for _ in range(SWEEPS):
            factors = [_factors(module, group) for group in found]
            again = [i for i, f in enumerate(factors) if float(f.log().abs().max()) > float(torch.tensor(EVEN).log())]
            for i in again:
                channels.scale(module, found[i], _factors(module, found[i]))
            changed.update(again)
            if not again:
                break
    return len(changed)


def _factors(module: GraphModule, group: Group) -> torch.Tensor:
    """[channels]: what each is multiplied by; 1 for a channel that nothing writes or reads."""
    written = torch.stack([_rows(module, node) for node in group.writers]).amax(0)
    read = torch.stack([_columns(module, node) for node in group.readers]).amax(0)
    factors = (read / written).sqrt()
    alive = (written > 0) & (read > 0)
    if not bool(alive.any()):
        return torch.ones_like(factors)
    factors = factors / factors[alive].log().mean().exp()  # the tensors as wholes keep their size
    return torch.where(alive, factors.clamp(1 / MOST, MOST), torch.ones_like(factors))


def _rows(module: GraphModule, writer: Node) -> torch.Tensor:
    """[outputs]: the largest absolute weight of each, as part of the largest of all."""
    weight = stored.tensor(module, writer.args[1]).abs()
    return weight.flatten(1).amax(1) / weight.amax().clamp_min(torch.finfo(weight.dtype).tiny)


def _columns(module: GraphModule, reader: Node) -> torch.Tensor:
    """[inputs]: the same of the weights that read each input channel."""
    weight = stored.tensor(module, reader.args[1]).abs()
    groups = channels.groups_of(reader)
    by_group = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)  # [groups, out, in, kernel]
    return by_group.amax((1, 3)).flatten() / weight.amax().clamp_min(torch.finfo(weight.dtype).tiny)
