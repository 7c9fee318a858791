"""What changed from one report to another, as values: figures with their verdicts, and differences of circumstances."""

from __future__ import annotations

from typing import Literal

from edgeopt.spec.values import Value

Outcome = Literal["better", "worse", "same", "not comparable"]


class Change(Value):
    """A figure of both reports. `ratio` is b / a; its interval is of 95 %, None where none is known."""

    name: str
    a: float | None
    b: float | None
    unit: str = ""
    ratio: float | None = None
    interval: tuple[float, float] | None = None  # of the ratio; of the difference for a metric
    verdict: Outcome
    words: str  # 'faster', 'slower', 'same', or why the two cannot be compared


class CandidateChange(Value):
    """A candidate of both reports; `only` names the report that alone has it, or in which alone it ran."""

    a: str | None
    b: str | None
    only: str | None = None
    why: str = ""
    figures: tuple[Change, ...] = ()


class Difference(Value):
    """A circumstance that is not the same: a version, the power mode, a setting."""

    name: str
    a: str
    b: str


class Comparison(Value):
    """Report B against report A. `verdict` and `reasons` are of what runs: the chosen candidate of each."""

    a: str
    b: str
    verdict: Outcome
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()  # why times cannot be compared, or are uncertain
    runs: CandidateChange | None = None
    candidates: tuple[CandidateChange, ...] = ()
    circumstances: tuple[Difference, ...] = ()
