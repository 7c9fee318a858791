"""Peak memory of activations, by liveness over the operators in their order.

A storage lives from the operator that makes it to the last one that reads it or a view of it. The caller holds the
inputs all the time, and outputs live to the end. Weights do not count, nor does what an operator needs inside itself
while it runs (the workspace of a convolution, the steps of a recurrent layer): that is the runtime's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeopt.program.operators import Walk
from edgeopt.program.program import Program


@dataclass(frozen=True)
class Peak:
    """The largest sum of live bytes, and the operator that runs then ('' where the program has none)."""

    bytes: int
    operator: str
    live_bytes: tuple[int, ...]  # while each operator runs


def peak_activation_bytes(program: Program, sizes: Mapping[str, int] | None = None) -> int:
    """Peak bytes of inputs, outputs and everything between, at the axis sizes given; without, at each axis's `opt`.

    Raises StageError where the program cannot be run at these sizes.
    """
    from edgeopt.program.walk import walk

    return peak(walk(program, sizes)).bytes


def peak(found: Walk) -> Peak:
    """The peak of a walked program."""
    held = {value.storage for value in found.inputs.values()}
    held_bytes = sum(found.storages[s] for s in held if s is not None)
    first, last = _spans(found)
    change = [0] * (len(found.operators) + 1)
    for storage, start in first.items():
        if storage not in held:
            change[start] += found.storages[storage]
            change[last[storage] + 1] -= found.storages[storage]
    live, now = [], held_bytes
    for step in change[:-1]:
        now += step
        live.append(now)
    if not live:
        return Peak(held_bytes, "", ())
    at = max(range(len(live)), key=live.__getitem__)
    return Peak(live[at], found.operators[at].name, tuple(live))


def _spans(found: Walk) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last operator that each storage lives through."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, operator in enumerate(found.operators):
        for value in (*operator.inputs, *operator.outputs):
            if value.storage is not None:
                first.setdefault(value.storage, at)
                last[value.storage] = at
    for value, _ in found.outputs.values():
        if value.storage in last:
            last[value.storage] = len(found.operators) - 1
    return first, last
