"""Limits of a project and of a profile; where both speak, the stricter wins."""

from __future__ import annotations

from pydantic import Field

from edgeopt.spec.values import Value


class Limits(Value):
    """What an artifact must keep. None means not limited."""

    latency_ms: float | None = Field(None, gt=0, description="p50 of one call on the device, in milliseconds")
    latency_p99_ms: float | None = Field(None, gt=0, description="p99 of one call on the device, in milliseconds")
    peak_rss_mb: float | None = Field(None, gt=0, description="peak resident memory of the runner, in MiB")
    power_w: float | None = Field(None, gt=0, description="mean power of the device while it runs, in watts")
    energy_mj: float | None = Field(None, gt=0, description="energy of the device a call, in millijoules")
    temperature_c: float | None = Field(None, description="hottest sensor while it runs, in °C")
    size_mb: float | None = Field(None, gt=0, description="size of the chosen candidate's file, in MiB")
    metric_drop: dict[str, float] = Field(
        {}, description="metric name -> the most it may fall below the unoptimised model (absolute)"
    )
    metric_min: dict[str, float] = Field({}, description="metric name -> the least value")
    sqnr_db: float | None = Field(None, description="proxy where there is no evaluate: least SQNR; default 20")
    top1_agreement: float | None = Field(
        None, ge=0, le=1, description="proxy for classifiers without evaluate: least agreement; default 0.99"
    )
    cases_mb: float = Field(64, gt=0, description="the most that recorded evaluation inputs may take, in MiB")


_LEAST = (
    "latency_ms", "latency_p99_ms", "peak_rss_mb", "power_w", "energy_mj", "temperature_c", "size_mb", "cases_mb",
)  # fmt: skip
_MOST = ("sqnr_db", "top1_agreement")


def stricter(a: Limits, b: Limits) -> Limits:
    """Both limits at once: the smaller of upper bounds, the larger of lower bounds."""
    out = {}
    for key, pick in [(k, min) for k in _LEAST] + [(k, max) for k in _MOST]:
        given = [v for v in (getattr(a, key), getattr(b, key)) if v is not None]
        out[key] = pick(given) if given else None
    out["metric_drop"] = _merge(a.metric_drop, b.metric_drop, min)
    out["metric_min"] = _merge(a.metric_min, b.metric_min, max)
    return Limits(**out)


def _merge(a: dict[str, float], b: dict[str, float], pick) -> dict[str, float]:
    return {k: pick([m[k] for m in (a, b) if k in m]) for k in sorted({*a, *b})}
