"""What an emulator's figures are worth: outputs and sizes are judged, times and what depends on them are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeopt.spec.manifest import Selection
from edgeopt.spec.report import CandidateResult, Check

# limits whose figures are the emulator's own, by the name of the check
NOT_JUDGED = ("latency_ms", "latency_p99_ms", "peak_rss_mb", "power_w", "energy_mj", "temperature_c")
_TIMES = ("p50_ms", "p90_ms", "p99_ms", "answers_per_s", "interval_ms")


def said(environment: Mapping[str, Any]) -> str | None:
    """What the runner said of the machine that it ran on: 'qemu-user 7.2.22'; None where it was a device."""
    found = environment.get("emulated")
    return str(found) if found else None


def unjudged(checks: Sequence[Check], emulator: str | None) -> tuple[Check, ...]:
    """The checks, those of `NOT_JUDGED` undecided with the reason where an emulator ran them."""
    if emulator is None:
        return tuple(checks)
    return tuple(
        c.model_copy(
            update={"verdict": "undecided", "evidence": f"{c.evidence}; not judged: it ran on an emulator ({emulator})"}
        )
        if c.name in NOT_JUDGED
        else c
        for c in checks
    )


def bare(result: CandidateResult, emulator: str | None) -> CandidateResult:
    """The result, without all that was timed where an emulator ran it."""
    if emulator is None:
        return result
    return result.model_copy(update={**dict.fromkeys(_TIMES), "rounds_ms": (), "uncertain": None})


def untimed(
    results: Sequence[CandidateResult], emulator: str | None, first: str | None = None
) -> tuple[CandidateResult, ...]:
    """What a choice may go by: on an emulator nothing that was timed, and the candidate named `first` before others."""
    if emulator is None:
        return tuple(results)
    return tuple(sorted((bare(r, emulator) for r in results), key=lambda r: r.name != first))


def marked(selection: Selection | None, emulator: str | None) -> Selection | None:
    """The choice with the mark in its reason."""
    if selection is None or emulator is None:
        return selection
    return selection.model_copy(update={"reason": f"EMULATED ({emulator}): {selection.reason}"})


def check(emulator: str | None) -> tuple[Check, ...]:
    """The check that keeps a report of an emulator's from being 'pass'."""
    if emulator is None:
        return ()
    evidence = f"{emulator}: its times are no device's, and no limit of time, memory or power was judged"
    return (Check(name="emulated", verdict="undecided", evidence=evidence),)


def changes(before: Selection | None, now: Selection, emulator: str | None) -> bool:
    """Whether `now` is to be written: an emulator replaces a choice only where its candidate did not run there."""
    return emulator is None or before is None or before.candidate != now.candidate
