"""How the project's named inputs reach the model's `forward`: by keyword, never by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from edgeopt.errors import ProjectError
from edgeopt.program import Signature
from edgeopt.program.frames import Lens
from edgeopt.spec.camera import BRIGHTEST, DARKEST
from edgeopt.spec.manifest import TensorSpec
from edgeopt.spec.project import Project
from edgeopt.spec.values import did_you_mean


def input_specs(project: Project) -> tuple[TensorSpec, ...]:
    """What the artifact takes, in the project's order: a camera's frames where an input has one."""
    return tuple(
        TensorSpec(name=name, dtype=given.given_dtype, shape=tuple(given.given_shape))
        for name, given in project.inputs.items()
    )


def value_ranges(project: Project) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each input that declares them, and of frames."""
    declared = {
        name: given.values or ((DARKEST, BRIGHTEST) if given.camera else None) for name, given in project.inputs.items()
    }
    return {name: (float(values[0]), float(values[1])) for name, values in declared.items() if values is not None}


def cameras(project: Project) -> dict[str, Lens]:
    """Input name -> how its frames become what forward takes."""
    return {
        name: Lens(given.camera, tuple(given.shape))
        for name, given in project.inputs.items()
        if given.camera is not None
    }


def batch_axis(signature: Signature) -> str | None:
    """The axis that every input has first, and only there; None where there is none."""
    first = {spec.shape[0] if spec.shape else None for spec in signature.inputs}
    if len(first) != 1:
        return None
    (name,) = first
    later = {size for spec in signature.inputs for size in spec.shape[1:]}
    return name if isinstance(name, str) and name not in later else None


def parameters(forward: Callable) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())


def check_parameters(parameters: list[inspect.Parameter], specs: tuple[TensorSpec, ...], *, where: str) -> None:
    """Refuse inputs that are no parameter of forward, and required parameters that have no input (ProjectError)."""
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    unnamed += [f"*{p.name}" for p in parameters if p.kind is p.VAR_POSITIONAL and not by_name]
    if unnamed:
        raise ProjectError(
            f"forward takes '{unnamed[0]}' by position only, and inputs are given by name", where=where,
            todo="wrap the model in a module whose forward names its inputs",
        )  # fmt: skip
    given = list(dict.fromkeys(spec.name.split(".")[0] for spec in specs))
    for name in given:
        if name not in by_name and not takes_any:
            near = did_you_mean(name, [n for n in by_name if n not in given])
            raise ProjectError(
                f"the input '{name}' is no parameter of forward" + (f", did you mean '{near}'?" if near else ""),
                where=f"key 'inputs.{name}'; {where}", todo="forward takes: " + (", ".join(by_name) or "nothing"),
            )  # fmt: skip
    for p in parameters:
        if p.name in by_name and p.default is p.empty and p.name not in given:
            raise ProjectError(
                f"forward needs '{p.name}', and the project has no such input", where=f"key 'inputs'; {where}",
                todo=f"add '{p.name}' with its shape and dtype to 'inputs'",
            )  # fmt: skip
