"""What quantization did, for people and for build.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from edgeopt.quant import rules
from edgeopt.quant.quantizer import Decision


@dataclass(frozen=True)
class QuantReport:
    """`scheme` in words; `counts`: operator pattern -> {'quantized': n, 'float': n}.

    `coverage`: part of the multiply-accumulates of convolutions, linears and matrix products that is done on
    integers, 0 to 1; `operator_coverage`: part of those operators. `left_float`: those of them that stay float, and
    why. `warnings`: one a layer and finding. `improved`: method of `quantization.improve` -> what it did.
    """

    scheme: str
    counts: dict[str, dict[str, int]]
    coverage: float
    left_float: dict[str, str]
    layers: tuple[Decision, ...]
    biases_corrected: int = 0  # layers
    warnings: tuple[str, ...] = ()
    batch_norms_folded: int = 0  # that graph passes had left, or were told to leave
    operator_coverage: float = 0.0
    improved: dict[str, str] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """Why there is nothing in it: no convolution, linear layer or matrix product runs on integers; else None."""
        if self.operator_coverage:
            return None
        if not self.left_float:
            return "the model has no convolution, linear layer or matrix product: integers gain nothing"
        lines = "; ".join(f"{layer}: {reason}" for layer, reason in self.left_float.items())
        return f"no convolution, linear layer or matrix product would run on integers: {lines}"


def report_of(scheme: str, decisions: tuple[Decision, ...], *, batch_norms_folded: int = 0) -> QuantReport:
    """The report before calibration, from the quantizer's decisions in graph order."""
    seen = Counter((d.rule, d.quantized) for d in decisions)
    total = sum(d.macs for d in decisions)
    counted = [d.quantized for d in decisions if d.rule in rules.COUNTED]
    return QuantReport(
        scheme=scheme,
        counts={
            rule: {"quantized": seen[rule, True], "float": seen[rule, False]}
            for rule in dict.fromkeys(d.rule for d in decisions)
        },
        coverage=sum(d.macs for d in decisions if d.quantized) / total if total else 0.0,
        left_float={d.path or d.node: d.reason for d in decisions if d.rule in rules.COUNTED and not d.quantized},
        layers=decisions,
        batch_norms_folded=batch_norms_folded,
        operator_coverage=sum(counted) / len(counted) if counted else 0.0,
    )
