"""The base of every value that is read from a file: frozen, strict, and with messages that name the key."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import pydantic

from edgeopt.errors import EdgeoptError

Value_ = TypeVar("Value_", bound="Value")


class Value(pydantic.BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)


def did_you_mean(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.6)
    return close[0] if close else None


def validate(model: type[Value_], data: Any, *, source: str, error: type[EdgeoptError]) -> Value_:
    """`data` as a `model`, or `error` that names the file (`source`), every wrong key, and the reason.

    Unknown keys come with the closest known one. `error` is the EdgeoptError subclass to raise.
    """
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as refused:
        lines = [_line(model, e) for e in refused.errors(include_url=False)]
        what = lines[0] if len(lines) == 1 else "\n".join(["several keys are wrong:", *("  - " + x for x in lines)])
        raise error(what, where=source, todo="correct the file and try again") from None


def _line(model: type[pydantic.BaseModel], e: Any) -> str:
    key = ".".join(str(part) for part in e["loc"]) or "(the whole file)"
    if e["type"] == "extra_forbidden":
        near = did_you_mean(e["loc"][-1], _keys_at(model, e["loc"][:-1]))
        return f"unknown key '{key}'" + (f", did you mean '{near}'?" if near else "")
    if e["type"] == "missing":
        return f"missing key '{key}'"
    message = e["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    given = "" if isinstance(e.get("input"), dict | list) or e["type"] == "value_error" else f" (given: {e['input']!r})"
    return f"key '{key}': {message}{given}"


def _keys_at(model: type[pydantic.BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The keys known at `path` below `model`; [] where the path leaves the models."""
    here: Any = model
    for part in path:
        here = _model_below(here, part)
        if here is None:
            return []
    return [field.alias or name for name, field in here.model_fields.items()]


def _model_below(model: Any, part: Any) -> Any:
    field = model.model_fields.get(part) if isinstance(part, str) else None
    if field is None:  # a list index or a mapping's key: the model of the items, found by the caller's annotation
        return model
    return _first_model(field.annotation)


def _first_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _first_model(inner)
        if found is not None:
            return found
    return None
