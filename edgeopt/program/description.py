"""A program described for people and for JSON: what it takes and gives, what it holds and what it costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from edgeopt.errors import StageError
from edgeopt.program.costs import Costs, costs_of
from edgeopt.program.operators import Walk
from edgeopt.program.program import ExportedGraph, OnnxGraph, Program, ScriptGraph
from edgeopt.spec.manifest import Axis, TensorSpec

MOST_IN_JSON = 100  # operators listed with their costs


@dataclass(frozen=True)
class Description:
    """`name`: of the point or the file. `facts`: what only this kind of graph has, as opset or captured by.

    `lines` is the graph as text. `costs` and `walk` are None where the program cannot be run and its sizes are not
    known; `why_not` says so.
    """

    name: str
    kind: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, Axis]
    lines: tuple[str, ...]
    costs: Costs | None
    walk: Walk | None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    why_not: str = ""


def describe(program: Program, name: str, *, notes: tuple[str, ...] = ()) -> Description:
    """The program described at each axis's `opt`."""
    from edgeopt.program.walk import walk

    found = why_not = None
    try:
        found = walk(program)
    except StageError as why:
        why_not = why.what
    signature = program.signature
    return Description(
        name=name, kind=_kind(program), inputs=signature.inputs, outputs=signature.outputs, axes=signature.axes,
        lines=lines_of(program), costs=costs_of(found) if found else None, walk=found, facts=_facts(program),
        notes=(*notes, *(found.notes if found else ())), why_not=why_not or "",
    )  # fmt: skip


def describe_script(module: Any, name: str) -> Description:
    """A TorchScript module of which nothing is known but itself: it names its inputs, and not their shapes."""
    from edgeopt.program import script_text

    return Description(
        name=name, kind="TorchScript (file)", inputs=(), outputs=(), axes={}, lines=script_text.lines(module),
        costs=None, walk=None, facts={
            "script_operators": script_text.operators(module),
            "weights": [dataclasses.asdict(weights) for weights in script_text.weights(module)],
        },
        why_not="a TorchScript file does not tell its inputs' shapes; name a project that does, by --project",
    )  # fmt: skip


def lines_of(program: Program) -> tuple[str, ...]:
    """The program's graph as text."""
    if isinstance(program, ExportedGraph):
        from edgeopt.program import text

        return text.lines(program)
    if isinstance(program, ScriptGraph):
        from edgeopt.program import script_text

        return script_text.lines(program.module)
    from edgeopt.program import onnx_text

    return onnx_text.lines(program.model)


def as_data(found: Description) -> dict[str, Any]:
    """The description as JSON data: all figures, and the operators that cost most."""
    data: dict[str, Any] = {
        "name": found.name,
        "kind": found.kind,
        "inputs": [spec.model_dump(mode="json") for spec in found.inputs],
        "outputs": [spec.model_dump(mode="json") for spec in found.outputs],
        "axes": {name: axis.model_dump(mode="json") for name, axis in found.axes.items()},
        "facts": found.facts,
        "notes": list(found.notes),
        "costs": None,
        "not_counted": found.why_not or None,
    }
    if found.costs is not None:
        data["costs"] = _costs_data(found.costs)
    return data


def _costs_data(costs: Costs) -> dict[str, Any]:
    fields = {f.name: getattr(costs, f.name) for f in dataclasses.fields(costs)}
    fields.update(flops=costs.flops, moved_bytes=costs.moved_bytes, flops_per_byte=round(costs.intensity, 3))
    fields["weights"] = [dataclasses.asdict(weight) for weight in costs.weights]
    fields["branches"] = {
        **dataclasses.asdict(costs.branches), "times_faster": round(costs.branches.times_faster, 3),
    }  # fmt: skip
    fields["top"] = [
        {
            "name": o.name, "op": o.op, "module": o.path, "kind": o.kind, "flops": o.flops,
            "read_bytes": o.read_bytes, "written_bytes": o.written_bytes,
            "outputs": [{"dtype": v.dtype, "shape": list(v.shape)} for v in o.outputs],
        }
        for o in costs.top[:MOST_IN_JSON]
    ]  # fmt: skip
    del fields["notes"]
    return fields


def _kind(program: Program) -> str:
    if isinstance(program, OnnxGraph):
        return "ONNX"
    return "torch.export" if isinstance(program, ExportedGraph) else f"TorchScript ({program.how})"


def _facts(program: Program) -> dict[str, Any]:
    if isinstance(program, OnnxGraph):
        opsets = {entry.domain or "ai.onnx": entry.version for entry in program.model.opset_import}
        return {"opset": opsets.pop("ai.onnx", None), "other_opsets": opsets, "ir_version": program.model.ir_version}
    if isinstance(program, ScriptGraph):
        from edgeopt.program import script_text

        return {"script_operators": script_text.operators(program.module)}
    return {"nodes": sum(1 for node in program.module.graph.nodes if node.op == "call_function")}
