"""Which of the candidates that passed runs: the fastest; within the noise of the fastest, the smallest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from edgeopt.spec.manifest import Selection
from edgeopt.spec.report import CandidateResult

_LARGEST_NOISE = 0.05  # a noisier run does not make a candidate that is slower by more than this an equal


def fastest(results: Sequence[CandidateResult], sizes: Mapping[str, int]) -> CandidateResult:
    """The candidate to run among `results`, which all passed; `sizes` are the bytes of their files.

    A candidate is equal to the fastest where its p50 is within the noise of the two (half the relative spread of a
    candidate's rounds, the larger one, and 5 % at the most); of equals the smaller file wins. Where nothing was
    timed the first does.
    """
    timed = [r for r in results if r.p50_ms is not None]
    if not timed:
        return results[0]
    least = min(timed, key=lambda r: r.p50_ms)
    equal = [r for r in timed if r.p50_ms <= least.p50_ms * (1 + max(_noise(r), _noise(least)))]
    return min(equal, key=lambda r: (sizes[r.name], r.p50_ms))


def selection(
    results: Sequence[CandidateResult],
    sizes: Mapping[str, int],
    *,
    decided_by: Literal["build", "validate"],
    where: str,
) -> Selection:
    """The choice among `results`, which all passed, with its reason and the figures that it was made by."""
    best = fastest(results, sizes)
    return Selection(
        candidate=best.name,
        decided_by=decided_by,
        where=where,
        reason="; ".join([reason(best, results), *slower_integers(results)]),
        verdict="undecided" if best.p50_ms is None else "faster" if len(results) > 1 else "only",
        figures={r.name: {"p50_ms": r.p50_ms, "p99_ms": r.p99_ms, "metrics": r.metrics} for r in results},
    )


def reason(best: CandidateResult, results: Sequence[CandidateResult]) -> str:
    """Why `best` was taken from `results`, in one line."""
    if best.p50_ms is None:
        return "speed was not measured"
    others = sorted((r for r in results if r.name != best.name and r.p50_ms is not None), key=lambda r: r.p50_ms)
    if not others:
        return f"the only candidate that passed: p50 {best.p50_ms:.3f} ms"
    words = ", ".join(f"{r.name} {r.p50_ms:.3f} ms ({r.p50_ms / best.p50_ms:.2f} times)" for r in others)
    tie = "" if best.p50_ms <= others[0].p50_ms else "; not slower beyond the noise, and smaller"
    return f"p50 {best.p50_ms:.3f} ms against {words}{tie}"


def slower_integers(results: Sequence[CandidateResult]) -> list[str]:
    """A sentence for each int8 candidate that is slower than the fastest float one beyond the noise (case Q11)."""
    timed = [r for r in results if r.p50_ms is not None]
    floats = [r for r in timed if r.precision != "int8"]
    if not floats:
        return []
    least = min(floats, key=lambda r: r.p50_ms)
    return [
        f"{r.name} is not chosen: int8 is slower here, {r.p50_ms:.3f} ms against {least.p50_ms:.3f} ms of {least.name}"
        for r in timed
        if r.precision == "int8" and r.p50_ms > least.p50_ms * (1 + max(_noise(r), _noise(least)))
    ]


def _noise(result: CandidateResult) -> float:
    return min(result.noise or 0.0, _LARGEST_NOISE)
