"""What flows through the stages: a captured model with its signature and reference calls."""

from edgeopt.program.program import (
    Call,
    ExportedGraph,
    OnnxGraph,
    Program,
    ScriptGraph,
    Signature,
)

__all__ = ["Call", "ExportedGraph", "OnnxGraph", "Program", "ScriptGraph", "Signature"]
