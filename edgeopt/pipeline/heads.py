"""The heads of the project on a program of whatever kind: what is lowered, compared and shipped."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeopt.program import ExportedGraph, Program, ScriptGraph
from edgeopt.spec.project import Project


def on(program: Program, project: Project) -> Program:
    """The program that gives what the artifact gives; itself where the project asks for no heads. ProjectError."""
    if not project.outputs:
        return program
    from edgeopt.capture import script
    from edgeopt.program import heads

    wanted = project.outputs
    changed: dict[str, Any] = {"signature": heads.signature(program.signature, wanted)}
    if isinstance(program, ExportedGraph):
        changed["module"] = heads.on_graph(program, wanted)
    elif isinstance(program, ScriptGraph):
        lines = heads.source(program.signature.output_names, wanted)
        changed["module"] = script.extended(program.module, program.signature, lines)
    decided = tuple(heads.decisions(changed["signature"], wanted).items())
    changed["signature"] = dataclasses.replace(changed["signature"], decisions=decided)
    return dataclasses.replace(program, reference=heads.calls(program.reference, wanted), **changed)
