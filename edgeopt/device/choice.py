"""Which of the candidates that passed runs: the fastest; of those that are not measurably slower, the smallest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from edgeopt.device import intervals
from edgeopt.spec.manifest import Selection
from edgeopt.spec.report import CandidateResult

_LARGEST_TIE = 0.05  # however noisy the run: a candidate that is slower by more than this is no equal


def fastest(results: Sequence[CandidateResult], sizes: Mapping[str, int]) -> CandidateResult:
    """The candidate to run among `results`, which all passed; `sizes` are the bytes of their files.

    Of those that tie with the fastest the smaller file wins. Where nothing was timed the first does.
    """
    timed = [r for r in results if r.ms is not None]
    if not timed:
        return results[0]
    least = min(timed, key=lambda r: r.ms)
    return min((r for r in timed if ties(r, least)), key=lambda r: (sizes[r.name], r.ms))


def ties(slower: CandidateResult, faster: CandidateResult) -> bool:
    """Whether the interval of the ratio of their rounds, paired, holds 1, and the ratio is 1.05 at the most."""
    if not slower.rounds_ms or not faster.rounds_ms:
        return slower.ms <= faster.ms
    found = intervals.ratio(slower.rounds_ms, faster.rounds_ms)
    return found.low <= 1 and found.value <= 1 + _LARGEST_TIE


def selection(
    results: Sequence[CandidateResult],
    sizes: Mapping[str, int],
    *,
    decided_by: Literal["build", "validate"],
    where: str,
    noise: Mapping[str, Any] | None = None,
) -> Selection:
    """The choice among `results`, which all passed, with its reason and the figures that it was made by.

    `noise`: see Response; it says on how many cores the settings were found.
    """
    best = fastest(results, sizes)
    words = [reason(best, results), *slower_integers(results)]
    if best.ms is not None and best.uncertain:
        words.append(f"uncertain: {best.uncertain}")
    return Selection(
        candidate=best.name,
        decided_by=decided_by,
        where=where,
        reason="; ".join(words),
        verdict="undecided" if best.ms is None else "faster" if len(results) > 1 else "only",
        figures={r.name: _figures(r) for r in results},
        mode="throughput" if best.answers_per_s else "latency",
        settings=_settings(best, noise),
    )


def reason(best: CandidateResult, results: Sequence[CandidateResult]) -> str:
    """Why `best` was taken from `results`, in one line."""
    if best.ms is None:
        return "speed was not measured"
    others = sorted((r for r in results if r.name != best.name and r.ms is not None), key=lambda r: r.ms)
    what, figure = ("an answer every", best.ms) if best.answers_per_s else ("p50", best.ms)
    if not others:
        return f"the only candidate that passed: {what} {figure:.3f} ms"
    words = ", ".join(f"{r.name} {r.ms:.3f} ms ({r.ms / best.ms:.2f} times)" for r in others)
    tie = "" if best.ms <= others[0].ms else "; not slower beyond the noise, and smaller"
    return f"{what} {figure:.3f} ms against {words}{tie}"


def slower_integers(results: Sequence[CandidateResult]) -> list[str]:
    """A sentence for each int8 candidate that is slower than the fastest float one beyond the noise (case Q11)."""
    timed = [r for r in results if r.ms is not None]
    floats = [r for r in timed if r.precision != "int8"]
    if not floats:
        return []
    least = min(floats, key=lambda r: r.ms)
    return [
        f"{r.name} is not chosen: int8 is slower here, {r.ms:.3f} ms against {least.ms:.3f} ms of {least.name}"
        for r in timed
        if r.precision == "int8" and r.ms > least.ms and not ties(r, least)
    ]


def _figures(result: CandidateResult) -> dict[str, Any]:
    figures = {
        "p50_ms": result.p50_ms, "p99_ms": result.p99_ms, "interval_ms": list(result.interval_ms or ()) or None,
        "metrics": result.metrics,
    }  # fmt: skip
    return {**figures, "answers_per_s": result.answers_per_s} if result.answers_per_s else figures


def _settings(best: CandidateResult, noise: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The tuned setting with the number of cores that it holds for; None where nothing was tuned."""
    if best.setting is None or not best.tried or not noise:
        return None
    return {"cores": noise["cores"]["all"], **best.setting}
