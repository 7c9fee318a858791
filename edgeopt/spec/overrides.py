"""`--set project.KEY=VALUE` and `--set profile.KEY=VALUE`: one key of a file replaced for one run.

KEY is dotted (`passes.fold_constants`), VALUE is a YAML scalar or flow (`off`, `3`, `[fp32, fp16]`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic

from edgeopt.errors import EdgeoptError, UsageError
from edgeopt.spec.values import did_you_mean
from edgeopt.spec.yaml_file import parse_value

SCOPES = ("project", "profile")


def parse_overrides(settings: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(project overrides, profile overrides), each dotted key -> YAML text, of `SCOPE.KEY=VALUE` settings.

    UsageError where a setting has no '=', an unknown scope, an empty key, or a value that is not YAML.
    Whether the key exists is checked by `apply_overrides`, which knows the file's format.
    """
    out: dict[str, dict[str, str]] = {scope: {} for scope in SCOPES}
    for setting in settings:
        name, equals, text = setting.partition("=")
        scope, dot, key = name.strip().partition(".")
        where = f"--set {setting}"
        if not equals:
            raise UsageError("a setting needs a value", where=where, todo="write it as --set profile.KEY=VALUE")
        if scope not in out:
            near = did_you_mean(scope, SCOPES)
            raise UsageError(
                f"a setting starts with 'project.' or 'profile.', not '{scope}'"
                + (f"; did you mean '{near}'?" if near else ""),
                where=where, todo="write --set project.KEY=VALUE or --set profile.KEY=VALUE",
            )  # fmt: skip
        if not dot or not all(key.split(".")):
            raise UsageError("a setting needs a key", where=where, todo=f"write it as --set {scope}.KEY=VALUE")
        parse_value(text, source=where, error=UsageError)
        out[scope][key] = text
    return out["project"], out["profile"]


def apply_overrides(
    data: dict[str, Any],
    overrides: Mapping[str, str],
    *,
    model: type[pydantic.BaseModel],
    scope: str,
    error: type[EdgeoptError],
) -> dict[str, Any]:
    """A copy of `data` (a file of format `model`) with each key replaced; `error` for an unknown key."""
    out = copy.deepcopy(data)
    for key, text in overrides.items():
        where = f"--set {scope}.{key}={text}"
        parts = _parts(key, out)
        _check_known(model, parts, scope=scope, where=where, error=error)
        here = out
        for part in parts[:-1]:
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
            if not isinstance(here, dict):
                raise error(
                    f"'{part}' is no mapping, so nothing below it can be set",
                    where=where,
                    todo=f"set {part} itself",
                )
        here[parts[-1]] = parse_value(text, source=where, error=error)
    return out


def _parts(key: str, data: dict[str, Any]) -> list[str]:
    """The keys that dotted KEY walks down, where a key of `data` may have dots itself, as the input 'batch.ids' has."""
    left, parts, here = key.split("."), [], data
    while left:
        known = [n for n in range(len(left), 1, -1) if isinstance(here, dict) and ".".join(left[:n]) in here]
        size = known[0] if known else 1
        parts.append(".".join(left[:size]))
        here = here.get(parts[-1]) if isinstance(here, dict) else None
        left = left[size:]
    return parts


def set_note(scope: str, overrides: Mapping[str, str] | None) -> str:
    """What a message adds to the file's name, so that a wrong value is looked for on the command line too."""
    return "".join(f" with --set {scope}.{key}={text}" for key, text in (overrides or {}).items())


def _check_known(model: Any, parts: list[str], *, scope: str, where: str, error: type[EdgeoptError]) -> None:
    """Walk `parts` down the format; names below a free mapping (passes, inputs) are not checked."""
    annotation: Any = model
    for position, part in enumerate(parts):
        below = model_in(annotation)
        if below is None:
            if mapping_in(annotation) is None:
                above = ".".join(parts[:position])
                raise error(f"'{above}' has no keys below it", where=where, todo=f"set {scope}.{above} itself")
            annotation = mapping_in(annotation)
            continue
        if part not in below.model_fields:
            known = list(below.model_fields)
            near = did_you_mean(part, known)
            hint = f", did you mean '{near}'?" if near else ""
            raise error(
                f"unknown key '{'.'.join(parts[: position + 1])}'{hint}",
                where=where, todo="choose one of: " + ", ".join(known),
            )  # fmt: skip
        annotation = below.model_fields[part].annotation


def model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model of `X` or of `X | None`; None for lists, mappings and scalars."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    if getattr(annotation, "__origin__", None) in (dict, tuple, list):
        return None
    for inner in getattr(annotation, "__args__", ()):
        found = model_in(inner)
        if found is not None:
            return found
    return None


def mapping_in(annotation: Any) -> Any:
    """The type of the values of a mapping, or of `mapping | other`; None where `annotation` is no mapping."""
    if getattr(annotation, "__origin__", None) is dict:
        return annotation.__args__[1]
    if getattr(annotation, "__origin__", None) in (tuple, list):
        return None
    return next(filter(None, map(mapping_in, getattr(annotation, "__args__", ()))), None)
