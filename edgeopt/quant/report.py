"""What quantization did, for people and for build.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from edgeopt.quant import rules
from edgeopt.quant.quantizer import Decision


@dataclass(frozen=True)
class QuantReport:
    """`scheme` in words; `counts`: operator pattern -> {'quantized': n, 'float': n}.

    `coverage`: part of the multiply-accumulates of convolutions, linears and matrix products that is done on
    integers, 0 to 1. `left_float`: those of them that stay float, and why. `warnings`: one a layer and finding.
    """

    scheme: str
    counts: dict[str, dict[str, int]]
    coverage: float
    left_float: dict[str, str]
    layers: tuple[Decision, ...]
    biases_corrected: int = 0  # layers
    warnings: tuple[str, ...] = ()


def report_of(scheme: str, decisions: tuple[Decision, ...]) -> QuantReport:
    """The report before calibration, from the quantizer's decisions in graph order."""
    seen = Counter((d.rule, d.quantized) for d in decisions)
    total = sum(d.macs for d in decisions)
    return QuantReport(
        scheme=scheme,
        counts={
            rule: {"quantized": seen[rule, True], "float": seen[rule, False]}
            for rule in dict.fromkeys(d.rule for d in decisions)
        },
        coverage=sum(d.macs for d in decisions if d.quantized) / total if total else 0.0,
        left_float={d.path or d.node: d.reason for d in decisions if d.rule in rules.COUNTED and not d.quantized},
        layers=decisions,
    )
