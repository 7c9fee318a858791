"""The rules that a project names, as passes."""

from __future__ import annotations

from edgeopt.errors import ProjectError
from edgeopt.passes.rules import FusionRule
from edgeopt.passes.rules_run import as_pass
from edgeopt.passes.table import Pass
from edgeopt.ports.user_code import load_attribute
from edgeopt.spec.project import Project


def load_rules(project: Project) -> tuple[Pass, ...]:
    """Each of `project.rules` as the pass `rule:NAME`, in order, NAME being the rule's own in its file.

    Raises ProjectError that names the user's file and line for code that does not load, for what is no rule, and for
    functions that cannot be traced.
    """
    passes: dict[str, Pass] = {}
    for spec in project.rules:
        found = load_attribute(spec, project.folder, key="rules")
        if not isinstance(found, FusionRule):
            raise ProjectError(
                f"'{spec}' is {type(found).__name__}, not a fusion rule", where=f"{project.source}, key 'rules'",
                todo="make it by edgeopt.rules.rule(pattern=..., replacement=..., inputs=...)",
            )  # fmt: skip
        made = as_pass(spec.rpartition(":")[2], found)
        if made.name in passes:
            raise ProjectError(
                f"two rules are named '{made.name}'", where=f"{project.source}, key 'rules'",
                todo="give one of them another name in its file",
            )  # fmt: skip
        passes[made.name] = made
    return tuple(passes.values())
