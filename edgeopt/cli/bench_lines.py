"""The table that `edgeopt bench` prints."""

from __future__ import annotations

import math

from edgeopt.flows.bench import Benched, Row, failed

_COLUMNS = ("", "ms", "95 %", "times the first", "SQNR dB", "top-1", "first call ms", "peak MiB", "runs with")


def table(done: Benched) -> str:
    """The table as text: a line a contender, those that failed below it, then the machine."""
    unit = "an answer every" if done.mode == "throughput" else "one call"
    rows = [_COLUMNS, *(_cells(row) for row in done.rows if row.result.failure is None)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [f"{done.name} on {done.host}, {done.mode}: {unit}, numpy in to numpy out"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
        lines.append("  " + "  ".join(cells).rstrip())
    lines += [f"  no figures: {line}" for line in failed(done)]
    return "\n".join([*lines, _machine(done)])


def _cells(row: Row) -> tuple[str, ...]:
    result, ratio = row.result, row.ratio
    low, high = result.interval_ms or (math.nan, math.nan)
    sqnr = "equal" if result.max_abs_error == 0 else "-" if result.sqnr_db is None else f"{result.sqnr_db:.1f}"
    return (
        result.name + (" (ours)" if row.ours else ""),
        f"{result.ms:.3f}" if result.ms is not None else "-",
        f"{low:.3f} - {high:.3f}",
        f"{ratio.value:.2f} ({ratio.low:.2f} - {ratio.high:.2f})" if ratio else "-",
        sqnr,
        "-" if result.top1_agreement is None else f"{100 * result.top1_agreement:.0f} %",
        f"{result.first_call_ms:.1f}" if result.first_call_ms is not None else "-",
        f"{result.peak_rss_mb:.0f}" if result.peak_rss_mb is not None else "-",
        _setting(row),
    )


def _setting(row: Row) -> str:
    setting = row.result.setting
    if not row.ours or setting is None:
        return "its defaults"
    words = [f"{setting['threads']} threads" if setting["threads"] else "its own threads"]
    words += [f"{setting['streams']} streams"] if setting["streams"] > 1 else []
    words += ["no spinning"] if setting["flags"].get("allow_spinning") is False else []
    return ", ".join(words)


def _machine(done: Benched) -> str:
    facts, noise = done.environment, done.noise or {}
    versions = ", ".join(f"{k} {v}" for k, v in sorted(facts.get("runtimes", {}).items()) if v)
    line = f"{facts.get('cpu_model')}, {noise.get('cores', {}).get('all', facts.get('cpu_count'))} cores, {versions}"
    if noise.get("repeated"):
        line += f"; {noise['repeated']} rounds of a busy machine were done again"
    return line + (f"\nUNCERTAIN: {done.uncertain} while this was measured" if done.uncertain else "")
