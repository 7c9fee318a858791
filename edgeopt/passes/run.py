"""Running the table: each pass on a copy, checked against the program before, dropped where it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import GraphModule

from edgeopt.passes import settings
from edgeopt.passes.changed import Changed, Context
from edgeopt.passes.check import Check, Verdict
from edgeopt.passes.table import PASSES, RULES_AFTER, Pass
from edgeopt.program import ExportedGraph, Program, graph
from edgeopt.progress import log
from edgeopt.spec.profile import Profile
from edgeopt.spec.profile_values import PassSetting

LARGE_GRAPH = 50_000  # nodes; the passes take some milliseconds for each
Status = Literal["applied", "nothing", "off", "dropped"]
Watch = Callable[[str, ExportedGraph], None]


@dataclass(frozen=True)
class PassRecord:
    """What a pass did.

    `max_abs_error` is scaled by the larger of 1 and the output's largest value, `max_rel_error` by the largest value
    alone; both are against the outputs that the program before the first pass gives in float64.
    """

    name: str
    changed: int
    declined: tuple[str, ...]
    nodes_before: int
    nodes_after: int
    seconds: float
    max_abs_error: float
    status: Status
    reason: str = ""
    level: str = "graph"
    max_rel_error: float = 0.0


@dataclass(frozen=True)
class Run:
    """How the table is run. `verified` off keeps a pass that changes the answer: for finding it.

    `rules`: the user's own, run as passes. `watch(name, program)` is told of the program before the first pass (as
    'start') and after every pass that changed it. `last`: the pass after which to stop.
    """

    rules: tuple[Pass, ...] = ()
    verified: bool = True
    watch: Watch | None = None
    last: str | None = None


def optimize(
    program: Program, profile: Profile, given: Mapping[str, PassSetting], how: Run | None = None
) -> tuple[Program, list[PassRecord]]:
    """The float program simplified, and a record of each pass. `given` switches and sets passes by name.

    TorchScript and ONNX programs come back as they are: their own optimizers work when they are lowered.
    Raises ProfileError for a name that is no pass, and for a setting that the pass does not have.
    """
    return _run(program, profile, given, "optimize", "float", how or Run())


def reoptimize(
    program: Program, profile: Profile, given: Mapping[str, PassSetting], how: Run | None = None
) -> tuple[Program, list[PassRecord]]:
    """The integer program cleaned, and a record of each pass; no Q/DQ decision is undone. Raises ProfileError."""
    return _run(program, profile, given, "reoptimize", "integer", how or Run())


def steps(graphs: str, rules: Sequence[Pass] = ()) -> tuple[Pass, ...]:
    """The passes for 'float' or 'integer' graphs, the user's rules in their place."""
    found: list[Pass] = []
    for step in PASSES:
        found.append(step)
        if step.name == RULES_AFTER:
            found += rules
    return tuple(step for step in found if step.graphs in (graphs, "both"))


def _run(
    program: Program, profile: Profile, given: Mapping[str, PassSetting], stage: str, graphs: str, how: Run
) -> tuple[Program, list[PassRecord]]:
    settled = settings.resolve(given, (*PASSES, *how.rules))
    if not isinstance(program, ExportedGraph):
        note = f"{stage}: no graph passes, since the program is no exported graph"
        return program.after(stage, notes=(note,)), []
    _warn_of_size(len(program.module.graph.nodes))
    check = Check(program) if how.verified else _unchecked
    watch = how.watch or (lambda name, program: None)
    watch("start", program)
    records = []
    module, spare = program.module, None
    for step in steps(graphs, how.rules):
        if settled[step.name] is None:
            records.append(_unchanged(step, module, "off", "switched off"))
        else:
            module, record, spare = _step(step, module, spare, check, profile, settled[step.name])
            records.append(record)
            if record.status == "applied":
                watch(step.name, program.after(stage, module=module))
        if step.name == how.last:
            break
    return program.after(stage, module=module), records


def _warn_of_size(nodes: int) -> None:
    if nodes > LARGE_GRAPH:
        log.warning(
            "the graph has %d nodes, as where a loop was unrolled: its passes and files take many minutes; a shorter "
            "loop, or one over an axis of a tensor, has fewer", nodes,
        )  # fmt: skip


def _unchecked(module: GraphModule) -> Verdict:
    return Verdict(float("nan"), float("nan"), None)


def _step(
    step: Pass, module: GraphModule, spare: GraphModule | None, check: Callable[[GraphModule], Verdict],
    profile: Profile, values: dict[str, Any],
) -> tuple[GraphModule, PassRecord, GraphModule | None]:  # fmt: skip
    """The module after one pass and its record; the module given where the pass changed nothing or failed.

    `spare` is a copy of the module that the pass before left as it was, and so is the third result: copying a graph
    takes longer than looking through it.
    """
    start = time.perf_counter()
    nodes_before = len(module.graph.nodes)
    try:
        candidate = graph.shared(module) if spare is None else spare
        changed = step.run(Context(candidate, profile, values))
        if not changed.count:
            untouched = len(candidate.graph.nodes) == nodes_before
            seconds = time.perf_counter() - start
            return module, _unchanged(step, module, "nothing", "", changed, seconds), candidate if untouched else None
        candidate.graph.lint()
        candidate.recompile()
        verdict = check(candidate)
    except Exception as why:  # a pass must never cost the user a build
        changed, verdict = Changed(0), Verdict(float("nan"), float("nan"), f"{type(why).__name__}: {why}")
    seconds = time.perf_counter() - start
    if verdict.reason:
        log.warning("the graph pass %s was dropped: %s", step.name, verdict.reason)
        return module, _unchanged(step, module, "dropped", verdict.reason, changed, seconds), None
    record = PassRecord(
        step.name, changed.count, changed.declined, nodes_before, len(candidate.graph.nodes), seconds,
        verdict.max_abs, "applied", "", step.level, verdict.max_rel,
    )  # fmt: skip
    return candidate, record, None


def _unchanged(
    step: Pass, module: GraphModule, status: Status, reason: str,
    changed: Changed | None = None, seconds: float = 0.0,
) -> PassRecord:  # fmt: skip
    nodes = len(module.graph.nodes)
    declined = changed.declined if changed else ()
    return PassRecord(step.name, 0, declined, nodes, nodes, seconds, 0.0, status, reason, step.level)
