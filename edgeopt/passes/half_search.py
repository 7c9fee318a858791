"""Whether a 16-bit program is close enough to fp32, and which modules must keep fp32 where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule

from edgeopt.errors import first_line
from edgeopt.program import Signature, graph
from edgeopt.program.program import ExportedGraph
from edgeopt.runtime.compare import output_errors, reasons_against
from edgeopt.spec.half_formats import HalfFormat
from edgeopt.spec.manifest import Tolerance

MOST_TRIES = 24  # conversions and runs: a culprit among 1000 modules takes 10

Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """The least SQNR over the outputs, and what is wrong in words; no reasons where all is well."""

    sqnr_db: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Judge:
    """Calls with their fp32 outputs, in one order."""

    signature: Signature
    inputs: Sequence[Outputs]
    wanted: Sequence[Outputs]
    form: HalfFormat

    def __call__(self, module: GraphModule) -> Verdict:
        """The verdict on a converted module; a failure of the module itself is a reason."""
        program = ExportedGraph(signature=self.signature, reference=(), module=module)
        try:
            found = [graph.run(program, inputs) for inputs in self.inputs]
        except Exception as why:  # whatever the graph's operators raise
            return Verdict(-math.inf, (f"it does not run: {first_line(why)}",))
        errors = output_errors(self.wanted, found)
        reasons = reasons_against(errors, Tolerance(sqnr_db=self.form.least_sqnr_db))
        return Verdict(min((e.sqnr_db for e in errors.values()), default=math.inf), tuple(reasons))


def culprits(units: Sequence[str], passes: Callable[[frozenset[str]], bool]) -> tuple[frozenset[str], int, bool]:
    """Units to keep in fp32 so that `passes(kept)` holds, the tries made, and whether the search came to its end.

    All of them kept must pass. Each round finds by bisection the shortest prefix of the units that is enough beside
    those found before; its last unit is needed, and joins them. Where the tries run out the last prefix is kept.
    """
    kept: frozenset[str] = frozenset()
    rest, tries = list(units), 0
    while rest:
        low, high = 0, len(rest)  # a prefix of `high` passes, one of `low` does not
        while high - low > 1:
            if tries == MOST_TRIES:
                return kept | set(rest[:high]), tries, False
            middle = (low + high) // 2
            tries += 1
            low, high = (low, middle) if passes(kept | set(rest[:middle])) else (middle, high)
        kept |= {rest[high - 1]}
        rest = rest[: high - 1]
        if not rest or tries == MOST_TRIES:
            return kept | set(rest), tries, not rest
        tries += 1
        if passes(kept):
            return kept, tries, True
    return kept, tries, True
