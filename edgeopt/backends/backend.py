"""What a backend is: a module with these three names; and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgeopt.errors import LoweringError, SpaceError
from edgeopt.program import ExportedGraph, OnnxGraph, Program
from edgeopt.spec.manifest import Candidate, EngineRecipe, Refusal
from edgeopt.spec.profile import Profile


@dataclass(frozen=True)
class Lowered:
    """Files written (names relative to the folder given), the candidates that load them, and what was refused.

    Two backends may name the same file: it was written once, and holds the same bytes for both.
    """

    files: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    recipes: tuple[EngineRecipe, ...] = ()
    refused: tuple[Refusal, ...] = ()


class Backend(Protocol):
    """A module of this room. It is called once with the float program and once with the integer program."""

    runtime: str

    def refusals(self, program: Program, profile: Profile) -> tuple[str, ...]:
        """Why this backend cannot take `program` to `profile`'s target; empty where it can. Writes nothing."""
        ...

    def lower(self, program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
        """Write the files into `out` and name the candidates; what fails comes back as `refused`, with its reason.

        `target_python`: an interpreter that has the target's torch, for test-loading.
        """
        ...


def precision_of(program: Program) -> str:
    """'int8' where the program holds integer arithmetic (Q/DQ operators or integer kernels), else its float type."""
    if isinstance(program, ExportedGraph | OnnxGraph) and program.integer:
        return "int8"
    return (program.half if isinstance(program, ExportedGraph) else None) or "fp32"


def disk_full(path: Path) -> SpaceError:
    """The error of a file that found no space."""
    return SpaceError("the disk is full", where=str(path), todo="free space, or build on another disk")


def refusal(candidate: str, why: LoweringError | str) -> Lowered:
    """Nothing written, and the one reason."""
    reason = why if isinstance(why, str) else why.what
    return Lowered(refused=(Refusal(candidate=candidate, reason=reason),))
