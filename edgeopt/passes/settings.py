"""What project and profile say of the passes, checked against the table: `passes: {NAME: off, OTHER: {KEY: VALUE}}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeopt.errors import ProfileError
from edgeopt.passes.table import Pass
from edgeopt.spec.profile_values import PassSetting
from edgeopt.spec.values import did_you_mean


def resolve(given: Mapping[str, PassSetting], table: Sequence[Pass]) -> dict[str, dict[str, Any] | None]:
    """Each pass's settings with its defaults filled in; None for a pass that is off.

    Raises ProfileError for a name that is no pass, a key that is no setting of it, and a value of another type.
    """
    by_name = {step.name: step for step in table}
    for name in given:
        if name not in by_name:
            raise _unknown(f"there is no graph pass '{name}'", f"key 'passes.{name}'", name, list(by_name), "passes")
    return {name: _of(step, given.get(name, step.on)) for name, step in by_name.items()}


def _of(step: Pass, given: PassSetting) -> dict[str, Any] | None:
    if given is False:
        return None
    values = {} if given is True else dict(given)
    for key, value in values.items():
        where = f"key 'passes.{step.name}.{key}'"
        if key not in step.settings:
            what = f"the pass '{step.name}' has no setting '{key}'"
            raise _unknown(what, where, key, list(step.settings), "settings")
        wanted = type(step.settings[key])
        if wanted is float and type(value) is int:
            values[key] = float(value)
        elif type(value) is not wanted:
            raise ProfileError(
                f"{value!r} is no {_TYPES[wanted]}", where=where, todo=f"its default is {step.settings[key]!r}"
            )
    return {**step.settings, **values}


_TYPES = {bool: "switch (on or off)", int: "whole number", float: "number", str: "text"}


def _unknown(what: str, where: str, name: str, known: list[str], kind: str) -> ProfileError:
    near = did_you_mean(name, known)
    hint = f", did you mean '{near}'?" if near else ""
    todo = f"the {kind} are: " + ", ".join(known) if known else "it is only switched on or off"
    return ProfileError(what + hint, where=where, todo=todo)
