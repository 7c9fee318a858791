"""Running the table: each pass on a copy, verified against the program before, dropped where it fails."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from dataclasses import dataclass
from typing import Literal

from torch.fx import GraphModule

from edgeopt.errors import ProfileError
from edgeopt.passes.changed import Changed
from edgeopt.passes.table import PASSES, Pass
from edgeopt.program import Call, ExportedGraph, Program, graph
from edgeopt.progress import log
from edgeopt.runtime.compare import output_errors, reasons_against
from edgeopt.spec.manifest import Tolerance
from edgeopt.spec.profile import Profile
from edgeopt.spec.values import did_you_mean

Status = Literal["applied", "nothing", "off", "dropped"]

MAX_ABS = 1e-4  # scaled by the largest value of the output; folding in float32 moves results by about 1e-6


@dataclass(frozen=True)
class PassRecord:
    """What a pass did. `max_abs_error` is the scaled error of the outputs against the program before the first pass."""

    name: str
    changed: int
    declined: tuple[str, ...]
    nodes_before: int
    nodes_after: int
    seconds: float
    max_abs_error: float
    status: Status
    reason: str = ""


def optimize(program: Program, profile: Profile, switches: dict[str, bool]) -> tuple[Program, list[PassRecord]]:
    """The float program simplified, and a record of each pass. `switches` turns passes on or off by name.

    TorchScript and ONNX programs come back as they are: their own optimizers work when they are lowered.
    Raises ProfileError for a switch that names no pass.
    """
    return _run(program, profile, switches, "optimize", "float")


def reoptimize(program: Program, profile: Profile, switches: dict[str, bool]) -> tuple[Program, list[PassRecord]]:
    """The integer program cleaned, and a record of each pass; no Q/DQ decision is undone. Raises ProfileError."""
    return _run(program, profile, switches, "reoptimize", "integer")


def _run(
    program: Program, profile: Profile, switches: dict[str, bool], stage: str, level: str
) -> tuple[Program, list[PassRecord]]:
    _check_switches(switches)
    if not isinstance(program, ExportedGraph):
        note = f"{stage}: no graph passes, since the program is no exported graph"
        return program.after(stage, notes=(note,)), []
    wanted = _smallest_call(program)
    records = []
    module = program.module
    for step in PASSES:
        if step.level not in (level, "both"):
            continue
        if not switches.get(step.name, True):
            records.append(_unchanged(step, module, "off", "switched off"))
            continue
        module, record = _step(step, module, program, wanted, profile)
        records.append(record)
    return program.after(stage, module=module), records


def _check_switches(switches: dict[str, bool]) -> None:
    names = [step.name for step in PASSES]
    for name in switches:
        if name not in names:
            near = did_you_mean(name, names)
            raise ProfileError(
                f"there is no graph pass '{name}'" + (f", did you mean '{near}'?" if near else ""),
                where=f"key 'passes.{name}'", todo="the passes are: " + ", ".join(names),
            )  # fmt: skip


def _step(
    step: Pass, module: GraphModule, program: ExportedGraph, wanted: Call, profile: Profile
) -> tuple[GraphModule, PassRecord]:
    """The module after one pass and its record; the module given where the pass changed nothing or failed."""
    start = time.perf_counter()
    nodes_before = len(module.graph.nodes)
    try:
        candidate = _shared(module)
        changed = step.run(candidate, profile)
        if not changed.count:
            return module, _unchanged(step, module, "nothing", "", changed, time.perf_counter() - start)
        candidate.graph.lint()
        candidate.recompile()
        error, reason = _verify(dataclasses.replace(program, module=candidate), wanted)
    except Exception as why:  # a pass must never cost the user a build
        changed, error, reason = Changed(0), float("nan"), f"{type(why).__name__}: {why}"
    seconds = time.perf_counter() - start
    if reason:
        log.warning("the graph pass %s was dropped: %s", step.name, reason)
        return module, _unchanged(step, module, "dropped", reason, changed, seconds)
    return candidate, PassRecord(
        step.name, changed.count, changed.declined, nodes_before, len(candidate.graph.nodes), seconds, error, "applied"
    )  # fmt: skip


def _unchanged(
    step: Pass, module: GraphModule, status: Status, reason: str,
    changed: Changed | None = None, seconds: float = 0.0,
) -> PassRecord:  # fmt: skip
    nodes = len(module.graph.nodes)
    declined = changed.declined if changed else ()
    return PassRecord(step.name, 0, declined, nodes, nodes, seconds, 0.0, status, reason)


def _shared(module: GraphModule) -> GraphModule:
    """A copy of the graph over the same tensors: passes replace tensors, and never write to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own pytree warns when a graph is copied
        copied = GraphModule(module, copy.deepcopy(module.graph))
    copied.meta = dict(module.meta)
    return copied


def _smallest_call(program: ExportedGraph) -> Call:
    """The reference call of the fewest inputs, with the program's own outputs.

    Its own, since a stage before may have moved them within its tolerance; one call, since every pass runs it.
    """
    call = min(program.reference, key=lambda call: sum(array.size for array in call.inputs.values()))
    return dataclasses.replace(call, outputs=graph.run(program, call.inputs))


def _verify(program: ExportedGraph, wanted: Call) -> tuple[float, str | None]:
    """The largest scaled error against the outputs before, and why it is too large, or None."""
    errors = output_errors([wanted.outputs], [graph.run(program, wanted.inputs)])
    reasons = reasons_against(errors, Tolerance(max_abs=MAX_ABS))
    return max(error.max_abs for error in errors.values()), "; ".join(reasons) or None
