"""Compare: what changed from one report to another, candidate by candidate, and whether it is more than noise.

Times are compared by a bootstrap of the ratio of their medians over the rounds of both reports, metrics by their own
intervals. What has no interval is compared by a tolerance that is written in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgeopt.device import intervals
from edgeopt.device.intervals import Estimate
from edgeopt.device.judge import DEFAULT_RELATIVE_DROP
from edgeopt.errors import ArtifactError, UsageError
from edgeopt.flows.validate import by_age
from edgeopt.spec.comparison import CandidateChange, Change, Comparison, Difference, Outcome
from edgeopt.spec.report import CandidateResult, Report
from edgeopt.spec.values import validate

LEAST_ROUNDS = 3  # of fewer a bootstrap says nothing
# Rounds of one run share its process, its memory layout and its minute: two runs of the same artifact differ by more
# than their rounds tell. benchmarks/validate.py measures by how much.
BETWEEN_RUNS = 0.02


class Row(NamedTuple):
    """A figure without rounds: `of` reads it, `tolerance` is relative, and lower is better."""

    name: str
    unit: str
    of: Callable[[CandidateResult], float | None]
    tolerance: float
    timed: bool  # whether it depends on machine, power mode and load


ROWS = (
    Row("p90", "ms", lambda c: c.p90_ms, 0.10, True),
    Row("p99", "ms", lambda c: c.p99_ms, 0.25, True),
    Row("load", "s", lambda c: c.load_s, 0.25, True),
    Row("first call", "ms", lambda c: c.first_call_ms, 0.50, True),
    Row("peak memory", "MiB", lambda c: c.peak_rss_mb, 0.05, False),
    Row("peak GPU memory", "MiB", lambda c: c.peak_gpu_mb, 0.05, False),
    Row("file size", "bytes", lambda c: c.size_bytes, 0.0, False),
)
# with an interval of their own, lower is better
FIGURES = (
    ("power", "W", lambda c: c.power_w),
    ("energy a call", "mJ", lambda c: c.energy_mj),
    ("energy above idle", "mJ", lambda c: c.energy_above_idle_mj),
)
# what makes the one that runs worse; the rest is shown
_TIMES = ("latency", "time an answer")
_DECISIVE = (*_TIMES, "peak memory", "power", "energy a call", "metric ")


def reports_of(first: Path, second: Path | None, last: int | None) -> tuple[tuple[str, Report], tuple[str, Report]]:
    """The two reports that were asked for, each with its name for people: (A, B).

    A path is a report's file, or an artifact, which stands for its newest report. With `last` the one artifact
    `first` is compared with itself: its newest report against the one that is `last` - 1 before it.
    """
    if (second is None) == (last is None):
        raise UsageError(
            "two reports are compared", where=str(first), todo="give two reports or artifacts, or one with --last 2"
        )
    if second is not None:
        return _named(first), _named(second)
    kept = kept_reports(first)
    if len(kept) < last:
        raise ArtifactError(
            f"{len(kept)} reports are kept, and --last {last} asks for {last}", where=str(first),
            todo=f"validate it again: edgeopt validate {first} [HOST]",
        )  # fmt: skip
    return _named(kept[-last]), _named(kept[-1])


def kept_reports(folder: Path) -> list[Path]:
    """The reports beside an artifact, oldest first by the time in them. ArtifactError for what is no artifact."""
    if not folder.is_dir():
        raise ArtifactError("there is no such artifact", where=str(folder), todo="give an artifact's folder")
    return by_age(folder)


def compare(a: tuple[str, Report], b: tuple[str, Report]) -> Comparison:
    """Report `b` against report `a`."""
    (name_a, old), (name_b, new) = a, b
    barriers = tuple(_barriers(old, new))
    in_a, in_b = ({c.name: c for c in report.candidates} for report in (old, new))
    candidates = tuple(
        _candidate(in_a.get(name), in_b.get(name), barriers) for name in dict.fromkeys([*in_a, *in_b])
    )  # fmt: skip
    runs = _candidate(in_a.get(old.chosen), in_b.get(new.chosen), barriers) if old.chosen and new.chosen else None
    verdict, reasons = _verdict(old, new, runs)
    notes = (*barriers, *_uncertain(old, new))
    return Comparison(
        a=name_a, b=name_b, verdict=verdict, reasons=reasons, notes=notes, runs=runs, candidates=candidates,
        circumstances=tuple(_circumstances(old, new)),
    )  # fmt: skip


def _named(path: Path) -> tuple[str, Report]:
    if path.is_dir():
        kept = kept_reports(path)
        if not kept:
            raise ArtifactError("no report yet", where=str(path), todo=f"run: edgeopt validate {path} [HOST]")
        path = kept[-1]
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError("there is no such report", where=str(path), todo="check the path") from None
    except OSError as why:
        raise ArtifactError(f"cannot read it: {why.strerror}", where=str(path), todo="check the path") from None
    except ValueError as why:
        raise ArtifactError(f"not JSON: {why}", where=str(path), todo="validate again") from None
    return str(path), validate(Report, data, source=str(path), error=ArtifactError)


def _barriers(a: Report, b: Report) -> Iterator[str]:
    """Why times of the two cannot be compared."""
    for report, which in ((a, "A"), (b, "B")):
        emulated = report.environment.get("emulated")
        if report.simulated:
            yield f"{which} is simulated: {report.simulated}"
        elif emulated:
            yield f"{which} ran on an emulator: {emulated}"
    if a.host != b.host:
        yield f"other host: {a.host}, {b.host}"
    for key, words in (("machine", "architecture"), ("cpu_model", "CPU"), ("cpu_count", "number of cores")):
        known = [report.environment.get(key) for report in (a, b)]
        if None not in known and known[0] != known[1]:
            yield f"other {words}: {known[0]}, {known[1]}"
    modes = [report.conditions.power_mode if report.conditions else None for report in (a, b)]
    if modes[0] != modes[1]:
        yield f"other power mode: {modes[0] or 'unknown'}, {modes[1] or 'unknown'}"


def _uncertain(a: Report, b: Report) -> Iterator[str]:
    for report, which in ((a, "A"), (b, "B")):
        said = next((c.uncertain for c in report.candidates if c.uncertain), None)
        if said:
            yield f"the times of {which} are uncertain: {said}"


def _candidate(a: CandidateResult | None, b: CandidateResult | None, barriers: Sequence[str]) -> CandidateChange:
    names = {"a": a.name if a else None, "b": b.name if b else None}
    if a is None or b is None:
        return CandidateChange(**names, only="B" if a is None else "A", why="the other has no such candidate")
    failed = [(which, c.failure) for which, c in (("A", a), ("B", b)) if c.failure]
    if failed:
        only = None if len(failed) == 2 else "B" if failed[0][0] == "A" else "A"
        why = "; ".join(f"not run in {which}: {failure}" for which, failure in failed)
        return CandidateChange(**names, only=only, why=why)
    return CandidateChange(**names, figures=tuple(_figures(a, b, barriers)))


def _figures(a: CandidateResult, b: CandidateResult, barriers: Sequence[str]) -> Iterator[Change]:
    against = [*barriers, *_own_barriers(a, b)]
    if a.ms is not None or b.ms is not None:
        yield _latency(a, b, against)
    for row in ROWS:
        yield from _plain(row, row.of(a), row.of(b), against if row.timed else barriers[:0])
    for name, unit, of in FIGURES:
        yield from _figure(name, unit, of(a), of(b), against)
    for name in dict.fromkeys([*a.metrics, *b.metrics]):
        yield _metric(name, a, b)


def _own_barriers(a: CandidateResult, b: CandidateResult) -> Iterator[str]:
    for c, which in ((a, "A"), (b, "B")):
        if c.throttled_rounds:
            yield f"the device throttled in {which}"
        if c.uncertain:
            yield f"the machine was busy in {which}"
    if bool(a.answers_per_s) != bool(b.answers_per_s):
        yield "one is latency, the other throughput"


def _latency(a: CandidateResult, b: CandidateResult, against: Sequence[str]) -> Change:
    name = "time an answer" if b.answers_per_s else "latency"
    fields: dict[str, Any] = {"name": name, "a": a.ms, "b": b.ms, "unit": "ms"}
    rounds = min(len(a.rounds_ms), len(b.rounds_ms))
    if not against and (a.ms is None or b.ms is None):
        against = ["not timed in both"]
    if not against and rounds < LEAST_ROUNDS:
        against = [f"{rounds} rounds, and {LEAST_ROUNDS} are needed"]
    if against:
        return Change(**fields, ratio=_ratio(a.ms, b.ms), verdict="not comparable", words="; ".join(against))
    found = intervals.ratio_of_medians(b.rounds_ms, a.rounds_ms)
    verdict = _beyond(found, 1, BETWEEN_RUNS)
    words = {"better": "faster", "worse": "slower", "same": "same"}[verdict]
    return Change(**fields, ratio=found.value, interval=(found.low, found.high), verdict=verdict, words=words)


def _beyond(found: Estimate, same: float, least: float) -> Outcome:
    """Where lower is better: whether the interval leaves `same` out, by a change of more than `least`."""
    if found.low > same and found.value - same > least:
        return "worse"
    return "better" if found.high < same and same - found.value > least else "same"


def _plain(row: Row, a: float | None, b: float | None, against: Sequence[str]) -> Iterator[Change]:
    if a is None and b is None:
        return
    fields: dict[str, Any] = {"name": row.name, "a": a, "b": b, "unit": row.unit, "ratio": _ratio(a, b)}
    if a is None or b is None or against:
        yield Change(**fields, verdict="not comparable", words="; ".join(against) or "not in both")
        return
    tolerance = row.tolerance * abs(a)
    verdict: Outcome = "worse" if b - a > tolerance else "better" if a - b > tolerance else "same"
    words = {"worse": "more", "better": "less", "same": "same"}[verdict]
    yield Change(**fields, verdict=verdict, words=f"{words}, within {100 * row.tolerance:.0f} % is the same")


def _figure(name: str, unit: str, a: Any, b: Any, against: Sequence[str]) -> Iterator[Change]:
    if a is None and b is None:
        return
    fields: dict[str, Any] = {"name": name, "a": a and a.value, "b": b and b.value, "unit": unit}
    if a is None or b is None or against:
        yield Change(**fields, verdict="not comparable", words="; ".join(against) or "not in both")
        return
    found = intervals.difference(*(Estimate(f.value, f.low, f.high) for f in (a, b)))
    verdict = _beyond(found, 0, BETWEEN_RUNS * abs(a.value))
    words = {"worse": "more", "better": "less", "same": "same"}[verdict]
    scale = abs(a.value) or 1.0
    ratio = (1 + found.low / scale, 1 + found.high / scale)
    yield Change(**fields, ratio=_ratio(a.value, b.value), interval=ratio, verdict=verdict, words=words)


def _metric(name: str, a: CandidateResult, b: CandidateResult) -> Change:
    """Higher is better. The same cases were asked, so that the two are paired and this interval is a wide one."""
    old, new = a.metrics.get(name), b.metrics.get(name)
    fields: dict[str, Any] = {"name": f"metric {name}", "a": old, "b": new}
    if old is None or new is None:
        return Change(**fields, verdict="not comparable", words="not in both")
    fields["ratio"] = _ratio(old, new)
    if old == new:
        return Change(**fields, verdict="same", words="same")
    known = [c.intervals.get(name) for c in (a, b)]
    if None in known:
        worse = old - new > DEFAULT_RELATIVE_DROP * abs(old)
        better = new - old > DEFAULT_RELATIVE_DROP * abs(old)
        verdict: Outcome = "worse" if worse else "better" if better else "same"
        words = {"worse": "lower", "better": "higher", "same": "same"}[verdict]
        return Change(**fields, verdict=verdict, words=f"{words}, interval unknown: within 1 % is the same")
    estimates = [Estimate(value, i.low, i.high) for value, i in zip((old, new), known, strict=True)]
    found = intervals.difference(*estimates)
    verdict = "worse" if found.high < 0 else "better" if found.low > 0 else "same"
    words = {"worse": "lower", "better": "higher", "same": "within its interval"}[verdict]
    return Change(**fields, interval=(found.low, found.high), verdict=verdict, words=words)


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None


def _verdict(a: Report, b: Report, runs: CandidateChange | None) -> tuple[Outcome, tuple[str, ...]]:
    """Of what runs: worse where one decisive figure is; else it takes times that can be compared to say more."""
    if a.verdict != "fail" and b.verdict == "fail":
        return "worse", (f"A was '{a.verdict}' and B fails: {b.reason}",)
    if a.verdict == "fail" and b.verdict != "fail":
        return "better", (f"A fails and B is '{b.verdict}'",)
    if runs is None:
        return "not comparable", ("no candidate was chosen in both",)
    if runs.figures == ():
        return "not comparable", (runs.why,)
    decisive = [f for f in runs.figures if f.name.startswith(_DECISIVE)]
    timed = [f for f in decisive if f.name.startswith(_TIMES)]
    for verdict, of in (("worse", decisive), ("not comparable", timed), ("better", decisive)):
        found = [f for f in of if f.verdict == verdict]
        if found:
            return verdict, tuple(f"{f.name}: {f.words}" for f in found)
    return "same", ("nothing that runs changed by more than the noise",)


def _circumstances(a: Report, b: Report) -> Iterator[Difference]:
    """What else is not the same, which may be why."""
    old, new = _flat(a), _flat(b)
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield Difference(name=name, a=_text(old.get(name)), b=_text(new.get(name)))


def _flat(report: Report) -> dict[str, Any]:
    facts = report.environment
    out: dict[str, Any] = {
        "artifact": report.artifact, "digest": report.digest[:12], "profile": report.profile, "host": report.host,
        "verdict": report.verdict, "chosen": report.chosen,
        "power mode": report.conditions.power_mode if report.conditions else None,
        **{key: facts.get(key) for key in ("python", "machine", "system", "cpu_model", "cpu_count", "memory_bytes")},
        **{f"{name} version": version for name, version in (facts.get("runtimes") or {}).items()},
    }  # fmt: skip
    for c in report.candidates:
        for key, value in (c.setting or {}).items():
            out[f"{c.name} {key}"] = value
        for flag in c.flags:
            out[f"{c.name} flag {flag.get('flag')}"] = flag.get("status")
    return out


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
