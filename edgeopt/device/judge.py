"""Judging what the runner measured: pure functions from figures and limits to checks."""

from __future__ import annotations

from collections.abc import Iterable

from edgeopt.spec.limits import Limits
from edgeopt.spec.manifest import Tolerance
from edgeopt.spec.report import CandidateResult, Check, Figure, Verdict

PROXY_SQNR_DB = 20.0  # design: without `evaluate` an artifact keeps at least this against the unoptimised model
PROXY_TOP1_AGREEMENT = 0.99
DEFAULT_RELATIVE_DROP = 0.01  # of a metric that has no limit of its own


def verdict(checks: Iterable[Check]) -> Verdict:
    """'fail' where one check fails, else 'undecided' where one is undecided, else 'pass'."""
    found = {check.verdict for check in checks}
    return "fail" if "fail" in found else "undecided" if "undecided" in found else "pass"


def failures(checks: Iterable[Check]) -> str:
    """The failed checks in words, or ''."""
    return "; ".join(check.evidence for check in checks if check.verdict == "fail")


def accuracy(
    result: CandidateResult,
    tolerance: Tolerance,
    baseline: dict[str, float],
    limits: Limits,
    *,
    classifier: bool = False,
) -> tuple[Check, ...]:
    """Whether the candidate's outputs and metrics are those of the unoptimised model.

    `baseline` are the unoptimised model's metrics; higher is better. Without any, SQNR (and the agreement of
    classes for a classifier) stands in, and the check is named 'proxy'.
    """
    checks = list(_closeness(result, tolerance))
    if baseline:
        checks += [_metric(name, result, value, limits) for name, value in sorted(baseline.items())]
        checks += [
            Check(name=f"metric {name}", verdict="fail", evidence=f"'evaluate' gives no metric '{name}'")
            for name in sorted({*limits.metric_drop, *limits.metric_min} - set(baseline))
        ]
    else:
        least = PROXY_SQNR_DB if limits.sqnr_db is None else limits.sqnr_db
        if result.sqnr_db is not None or not tolerance.agreement:
            checks.append(_at_least("proxy sqnr_db", result.sqnr_db, least, "SQNR", "dB"))
        if classifier or tolerance.agreement:
            least = PROXY_TOP1_AGREEMENT if limits.top1_agreement is None else limits.top1_agreement
            checks.append(_at_least("proxy top1_agreement", result.top1_agreement, least, "top-1 agreement", ""))
    return tuple(checks)


def performance(result: CandidateResult, limits: Limits, *, size_bytes: int | None = None) -> tuple[Check, ...]:
    """Latency, memory, power, energy, temperature and size against their limits; nothing where there are none."""
    size_mb = None if size_bytes is None else size_bytes / (1 << 20)
    rows = (
        ("latency_ms", result.p50_ms, limits.latency_ms, "p50", "ms"),
        ("latency_p99_ms", result.p99_ms, limits.latency_p99_ms, "p99", "ms"),
        ("peak_rss_mb", result.peak_rss_mb, limits.peak_rss_mb, "peak memory", "MiB"),
        ("power_w", *_with_interval(result.power_w, "mean power", "W", limits.power_w), "W"),
        ("energy_mj", *_with_interval(result.energy_mj, "energy a call", "mJ", limits.energy_mj), "mJ"),
        ("temperature_c", result.temperature_c, limits.temperature_c, "the hottest sensor", "°C"),
        ("size_mb", size_mb, limits.size_mb, "file size", "MiB"),
    )
    return tuple(
        _at_most(name, value, limit, what, unit) for name, value, limit, what, unit in rows if limit is not None
    )


def _with_interval(found: Figure | None, what: str, unit: str, limit: float | None):
    """(value, limit, what it is) of a row: the interval stands in the words."""
    if found is None:
        return None, limit, what
    return found.value, limit, f"{what} (95 % interval {found.low:.4g} to {found.high:.4g} {unit})"


def _closeness(result: CandidateResult, tolerance: Tolerance) -> Iterable[Check]:
    if tolerance.sqnr_db is not None:
        yield _at_least("reference sqnr_db", result.sqnr_db, tolerance.sqnr_db, "SQNR against the reference", "dB")
    if tolerance.max_abs is not None:
        yield _at_most("reference max_abs", result.max_abs_error, tolerance.max_abs, "error against the reference", "")
    if tolerance.agreement:
        least = max(one.least for one in tolerance.agreement.values())
        yield _at_least(
            "reference agreement", result.top1_agreement, least, "agreement with the reference's classes", ""
        )


def interval_in_words(result: CandidateResult, metric: str) -> str:
    """The confidence interval of a metric, or that it is not known: '95 % interval 86.2 to 98.9, 48 samples'."""
    found = result.intervals.get(metric)
    if found is None:
        return "interval unknown"
    return f"95 % interval {found.low:.4g} to {found.high:.4g}, {found.samples} samples"


def _metric(name: str, result: CandidateResult, baseline: float, limits: Limits) -> Check:
    drop = limits.metric_drop.get(name)
    if drop is None and name not in limits.metric_min:
        drop = abs(baseline) * DEFAULT_RELATIVE_DROP
    bounds = [baseline - drop] if drop is not None else []
    bounds += [limits.metric_min[name]] if name in limits.metric_min else []
    what = f"{name} (unoptimised {baseline:.6g}; {interval_in_words(result, name)})"
    return _at_least(f"metric {name}", result.metrics.get(name), max(bounds), what, "")


def _at_least(name: str, value: float | None, limit: float, what: str, unit: str) -> Check:
    return _bound(name, value, limit, what, unit, "at least", value is not None and value >= limit)


def _at_most(name: str, value: float | None, limit: float, what: str, unit: str) -> Check:
    return _bound(name, value, limit, what, unit, "at most", value is not None and value <= limit)


def _bound(name: str, value: float | None, limit: float, what: str, unit: str, words: str, holds: bool) -> Check:
    unit = f" {unit}" if unit else ""
    if value is None:
        return Check(name=name, verdict="undecided", limit=limit, evidence=f"{what} was not measured")
    evidence = f"{what} is {value:.6g}{unit}, {words} {limit:.6g}{unit} is asked for"
    return Check(name=name, verdict="pass" if holds else "fail", value=value, limit=limit, evidence=evidence)
