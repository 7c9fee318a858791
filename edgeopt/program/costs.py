"""What a program costs at given axis sizes: operators, weights, FLOPs, bytes moved, peak memory, branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from edgeopt.program import branches, liveness
from edgeopt.program.branches import Branches
from edgeopt.program.operators import Operator, Walk, Weights
from edgeopt.program.program import Program


@dataclass(frozen=True)
class Costs:
    """Figures of one program at the axis `sizes`.

    `contraction_flops` are counted by torch's FlopCounterMode, a multiply-add as 2; `other_flops` are the estimates
    of `estimates`. `read_bytes` and `written_bytes` are those of every operator by itself: nothing fused, no cache.
    `unknown`: operators whose FLOPs nobody knows, which are left out of the sum.
    """

    sizes: dict[str, int]
    operators: dict[str, int]  # operator -> how many, the most frequent first; views included
    unknown: dict[str, int]
    weights: tuple[Weights, ...]
    contraction_flops: int
    other_flops: int
    read_bytes: int
    written_bytes: int
    peak_activation_bytes: int
    peak_operator: str
    branches: Branches
    contractions: int
    integer_contractions: int  # of them, those that read integers: through dequantizations alone, or by their kind
    top: tuple[Operator, ...]  # all that have FLOPs, the largest first
    notes: tuple[str, ...]

    @property
    def flops(self) -> int:
        return self.contraction_flops + self.other_flops

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0

    @property
    def weight_bytes(self) -> int:
        return sum(w.bytes for w in self.weights)


def costs(program: Program, sizes: Mapping[str, int] | None = None) -> Costs:
    """The program's costs at the axis sizes given; without, at each axis's `opt`. StageError where it cannot run."""
    from edgeopt.program.walk import walk

    return costs_of(walk(program, sizes))


def costs_of(found: Walk) -> Costs:
    """The costs of a walked program."""
    peak = liveness.peak(found)
    unknown = Counter(o.op for o in found.operators if o.kind == "unknown")
    return Costs(
        sizes=found.sizes,
        operators=dict(Counter(o.op for o in found.operators).most_common()),
        unknown=dict(unknown.most_common()),
        weights=found.weights,
        contraction_flops=sum(o.flops for o in found.operators if o.kind == "contraction"),
        other_flops=sum(o.flops for o in found.operators if o.kind == "other"),
        read_bytes=sum(o.read_bytes for o in found.operators),
        written_bytes=sum(o.written_bytes for o in found.operators),
        peak_activation_bytes=peak.bytes,
        peak_operator=peak.operator,
        branches=branches.branches(found),
        contractions=sum(o.kind == "contraction" for o in found.operators),
        integer_contractions=sum(_reads_integers(o, found) for o in found.operators),
        top=tuple(sorted((o for o in found.operators if o.flops), key=lambda o: -o.flops)),
        notes=found.notes,
    )


_INTEGER = {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "_int_mm"}
_LAYOUT = {"Transpose", "permute", "transpose", "t"}


def _reads_integers(operator: Operator, found: Walk) -> bool:
    """Whether a contraction computes on integers: all that it reads was dequantized right before it."""
    if operator.kind != "contraction":
        return False
    if operator.op in _INTEGER:
        return True
    sources = [_behind_views(at, found) for at in operator.sources]
    stored = sum(v.storage is None and len(v.shape) > 1 for v in operator.inputs)  # a bias may stay float
    dequantized = all(o.op.lower().startswith("dequantize") for o in sources)
    return bool(sources) and dequantized and stored <= sum(o.kind == "constant" for o in sources)


def _behind_views(at: int, found: Walk) -> Operator:
    operator = found.operators[at]
    while (operator.kind == "view" or operator.op in _LAYOUT) and len(operator.sources) == 1:
        operator = found.operators[operator.sources[0]]
    return operator
