"""The report of a validation: what was measured, where, and each check's verdict with its evidence."""

from __future__ import annotations

from typing import Any, Literal

from edgeopt.spec.values import Value

Verdict = Literal["pass", "fail", "undecided"]


class Check(Value):
    """One thing judged: `value` against `limit`, both in the unit that the name ends with."""

    name: str
    verdict: Verdict
    value: float | None = None
    limit: float | None = None
    evidence: str = ""


class Interval(Value):
    """The 95 % confidence interval of a metric, in the metric's own unit, from so many samples."""

    low: float
    high: float
    samples: int
    method: Literal["wilson", "bootstrap", "normal"]


class CandidateResult(Value):
    """What the runner measured of one candidate; `failure` set where it gave no figures."""

    name: str
    runtime: str
    precision: str
    failure: str | None = None
    load_s: float | None = None
    first_call_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    calls: int = 0
    noise: float | None = None  # half the relative spread of the rounds' medians
    rounds_ms: tuple[float, ...] = ()  # of each round the median of its calls, or ms an answer for throughput
    interval_ms: tuple[float, float] | None = None  # 95 %, of the median of the rounds
    answers_per_s: float | None = None  # throughput mode, where there are no percentiles of calls
    setting: dict[str, Any] | None = None  # what was tuned: {"threads", "streams", "flags"}
    tried: tuple[dict[str, Any], ...] = ()  # settings with their "ms"
    warm_up: dict[str, Any] | None = None  # {"calls", "seconds", "stable"}
    uncertain: str | None = None  # why the times are: other work on the machine
    peak_rss_mb: float | None = None
    size_bytes: int | None = None  # of its file
    metrics: dict[str, float] = {}
    intervals: dict[str, Interval] = {}  # of the metrics whose samples are known
    sqnr_db: float | None = None
    max_abs_error: float | None = None  # scaled: largest |r - x| over max(1, largest |r|)
    top1_agreement: float | None = None
    flags: tuple[dict[str, Any], ...] = ()  # {"flag", "status", "message"}

    @property
    def ms(self) -> float | None:
        """What candidates are chosen by: p50 of a call, or milliseconds an answer; None where nothing was timed."""
        return 1e3 / self.answers_per_s if self.answers_per_s else self.p50_ms


class Report(Value):
    """`reports/*.json`. `simulated` marks figures from an emulator or a recording: never shown as the device's."""

    schema_version: int = 1
    artifact: str
    digest: str
    profile: str
    host: str
    when_utc: str  # ISO 8601, seconds
    verdict: Verdict
    chosen: str | None
    reason: str
    checks: tuple[Check, ...]
    candidates: tuple[CandidateResult, ...]
    emulated: str | None = None  # what ran the device's programs in place of its CPU: 'qemu-user 7.2.22'
    environment: dict[str, Any]
    simulated: str | None = None
    seconds: float
