"""A described graph, the passes that made it, and the difference of two graphs, as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgeopt.program.branches import Branches
from edgeopt.program.costs import Costs
from edgeopt.program.description import Description
from edgeopt.program.operators import short_dtype
from edgeopt.report.figures import count, percent, size
from edgeopt.report.text import WIDTH
from edgeopt.spec.manifest import TensorSpec

TOP = 10
_REGIONS = 4  # places with branches that are named
_STATUS = {"applied": "", "nothing": "dim", "off": "dim", "dropped": "bold yellow"}
_DIFF = {"+": "green", "-": "red", "@": "cyan"}


def plain(renderable: RenderableType, *, width: int = WIDTH) -> str:
    """What rich would print, as text without colours, `width` columns wide at most."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def described(found: Description, *, top: int = TOP) -> Group:
    """What the graph takes, gives, holds and costs, and its `top` operators by FLOPs."""
    parts: list[RenderableType] = [
        Text.assemble((found.name, "bold"), f"  {found.kind}{_facts(found)}"),
        _figures(found),
    ]
    if found.costs is not None and found.costs.top:
        parts += [Text(), _top(found.costs, top)]
    return Group(*parts)


def passes(records: Sequence[Mapping[str, Any]]) -> Group:
    """One line a pass: what it changed, the nodes before and after, its errors; below it what it left alone and why."""
    width = max((len(record["name"]) for record in records), default=0)
    lines: list[RenderableType] = [Text(_pass_line("pass", width, *_PASS_HEAD), style="bold")]
    for record in records:
        applied = record["status"] == "applied"
        nodes = f"{record['nodes_before']} > {record['nodes_after']}" if applied else str(record["nodes_before"])
        errors = [_error(record[key]) if applied else "-" for key in ("max_abs_error", "max_rel_error")]
        changed = str(record["changed"]) if applied else "-"
        word = {"applied": "", "nothing": "found nothing"}.get(record["status"], record["status"])
        line = _pass_line(record["name"], width, changed, nodes, f"{record['seconds']:.2f}", *errors, word)
        lines.append(Text(line, style=_STATUS.get(record["status"], ""), no_wrap=True, overflow="ellipsis"))
        lines += [Padding(Text(words), (0, 0, 0, 6)) for words in _reasons(record)]
    return Group(*lines)


_PASS_HEAD = ("changed", "nodes", "s", "max abs", "max rel", "")


def _pass_line(name: str, width: int, *cells: str) -> str:
    changed, nodes, seconds, max_abs, max_rel, word = cells
    figures = f"{changed:>7} {nodes:>11} {seconds:>6} {max_abs:>7} {max_rel:>7}  {word}"
    return f"  {name:<{width}} {figures}".rstrip()


def difference(before: Description, after: Description, lines: Sequence[str]) -> Group:
    """The figures of two graphs side by side, and the lines that differ."""
    parts: list[RenderableType] = [_side_by_side(before, after), Text()]
    if not lines:
        parts.append(Text(f"no difference: {before.name} and {after.name} are the same graph"))
    parts += [Text(line, style=_DIFF.get(line[:1], ""), no_wrap=True, overflow="ignore") for line in lines]
    return Group(*parts)


def candidates(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The candidates of an artifact: what each runs, its file, what that holds and costs."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for title, key in _CANDIDATE_COLUMNS.items():
        table.add_column(title, justify="left" if key in ("candidate", "file") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(row[key])) for key in _CANDIDATE_COLUMNS.values()))
    return table


_CANDIDATE_COLUMNS = {
    "candidate": "candidate", "file": "file", "opset": "opset", "size": "size", "ops": "operators", "Q/DQ": "qdq",
    "int8": "integer", "params": "parameters", "FLOPs": "flops",
}  # fmt: skip


def candidate_row(name: str, found: Description, file: str, file_bytes: int) -> dict[str, str]:
    """A line of `candidates`."""
    costs = found.costs
    counts = costs.operators if costs else {}
    quantized = sum(n for op, n in counts.items() if op.lower().startswith(("quantize", "dequantize")))
    return {
        "candidate": name,
        "file": file,
        "opset": found.facts.get("opset") or "-",
        "size": size(file_bytes),
        "operators": sum(counts.values()) if costs else "-",
        "qdq": quantized if costs else "-",
        "integer": f"{costs.integer_contractions} of {costs.contractions}" if costs else "-",
        "parameters": f"{count(sum(w.elements for w in costs.weights))}" if costs else "-",
        "flops": count(costs.flops) if costs else "-",
    }


def _facts(found: Description) -> str:
    parts = [f"opset {found.facts['opset']}"] if found.facts.get("opset") else []
    parts += [f"{name} {version}" for name, version in found.facts.get("other_opsets", {}).items()]
    parts += [f"{found.facts['nodes']} nodes"] if "nodes" in found.facts else []
    if found.costs is not None and found.costs.sizes:
        parts.append("at " + ", ".join(f"{name}={at}" for name, at in found.costs.sizes.items()))
    return "".join(f", {part}" for part in parts)


def _figures(found: Description) -> Table:
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, words in _rows(found):
        grid.add_row(f"  {label}", Text(words))
    return grid


def _rows(found: Description) -> Iterator[tuple[str, str]]:
    yield "inputs", _specs(found.inputs)
    yield "outputs", _specs(found.outputs)
    if found.axes:
        yield "axes", ", ".join(f"{name} {a.min} to {a.max}, tuned for {a.opt}" for name, a in found.axes.items())
    costs = found.costs
    if costs is not None:
        yield from _cost_rows(costs)
    elif found.facts.get("script_operators"):
        yield "operators", _counts(found.facts["script_operators"])
        held = [f"{w['elements']:,} {w['dtype']} ({size(w['bytes'])})" for w in found.facts.get("weights", ())]
        yield "parameters", ", ".join(held) or "none"
    if found.why_not:
        yield "costs", f"not counted: {found.why_not}"
    for note in dict.fromkeys(found.notes):
        yield "note", note


def _cost_rows(costs: Costs) -> Iterator[tuple[str, str]]:
    yield "operators", f"{sum(costs.operators.values())}: {_counts(costs.operators)}"
    if costs.integer_contractions:
        words = "convolutions, matmuls and the like read integers"
        yield "integer", f"{costs.integer_contractions} of {costs.contractions} {words}"
    held = ", ".join(f"{w.dtype} {size(w.bytes)}" for w in costs.weights)
    total = sum(w.elements for w in costs.weights)
    yield "parameters", f"{total:,} ({held})" if total else "none"
    counted, estimated = count(costs.contraction_flops), count(costs.other_flops)
    words = f"{counted} in convolutions, matmuls and the like (a multiply-add is 2), {estimated} elsewhere (estimated)"
    yield "FLOPs", f"{count(costs.flops)}: {words}"
    if costs.unknown:
        yield "not counted", "operators that no formula knows: " + _counts(costs.unknown)
    words = (
        f"{size(costs.read_bytes)} read, {size(costs.written_bytes)} written, each operator by itself, nothing fused"
    )
    yield "moved", f"{size(costs.moved_bytes)}: {words}; {costs.intensity:.1f} FLOPs a byte"
    at = f" at {costs.peak_operator}" if costs.peak_operator else ""
    yield "peak memory", f"{size(costs.peak_activation_bytes)} of activations{at}, weights and workspaces apart"
    yield "branches", "\n".join(_branches(costs.branches))


def _branches(found: Branches) -> Iterator[str]:
    if found.at_once < 2:
        yield "1: a chain; nothing could run at once"
        return
    yield (
        f"independent branches: {found.at_once}, at most {found.times_faster:.2f} times faster if they ran at once "
        f"(longest chain {count(found.critical_flops)} of {count(found.total_flops)} FLOPs)"
    )
    for region in found.regions[:_REGIONS]:
        words = " | ".join(f"{_chain(names)} {count(flops)}" for names, flops in region.branches)
        yield f"- {words}"
    left = len(found.regions) - _REGIONS
    if left > 0:
        yield f"- and {left} more places"


def _chain(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _top(costs: Costs, most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("  most FLOPs", overflow="fold")
    table.add_column("result", overflow="fold")
    for name in ("FLOPs", "share", "moved"):
        table.add_column(name, justify="right", no_wrap=True)
    for operator in costs.top[:most]:
        shapes = ", ".join(f"{short_dtype(v.dtype)}{list(v.shape)}" for v in operator.outputs[:1])
        table.add_row(
            Text(f"  {operator.name}"), Text(shapes), count(operator.flops), percent(operator.flops / costs.flops),
            size(operator.moved_bytes),
        )  # fmt: skip
    return table


def _side_by_side(before: Description, after: Description) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for found in (before, after):
        table.add_column(found.name, justify="right", overflow="fold")
    for label, of in _COMPARED.items():
        cells = [of(found.costs) if found.costs is not None else "-" for found in (before, after)]
        table.add_row(label, *cells, style="" if cells[0] != cells[1] else "dim")
    return table


_COMPARED = {
    "operators": lambda c: str(sum(c.operators.values())),
    "parameters": lambda c: f"{sum(w.elements for w in c.weights):,}",
    "bytes of them": lambda c: size(c.weight_bytes),
    "FLOPs": lambda c: count(c.flops),
    "moved": lambda c: size(c.moved_bytes),
    "peak memory": lambda c: size(c.peak_activation_bytes),
    "branches": lambda c: f"{c.branches.at_once}, {c.branches.times_faster:.2f}x",
    "on integers": lambda c: f"{c.integer_contractions} of {c.contractions}",
}


def _reasons(record: Mapping[str, Any]) -> Iterator[str]:
    if record["status"] == "dropped":
        yield record["reason"]
    yield from _declined(record["declined"])


def _declined(declined: Sequence[str]) -> Iterator[str]:
    """The reasons, each once with how often and the first place."""
    places: dict[str, list[str]] = {}
    for line in declined:
        place, colon, reason = line.partition(": ")
        places.setdefault(reason if colon else place, []).append(place)
    for reason, where in places.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield f"left {where[0]}{more}: {reason}"


def _error(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def _specs(specs: Sequence[TensorSpec]) -> str:
    return "\n".join(f"{s.name} {s.dtype} [{', '.join(str(n) for n in s.shape)}]" for s in specs) or "unknown"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())
