"""The user's structure around outputs and inputs: flattened to named tensors, described as JSON for the device.

The JSON is one of: {"kind": "tensor", "index": i}, {"kind": "none"}, {"kind": "tuple" or "list", "items": [...]},
{"kind": "dict", "items": {key: node}, "order": [key, ...]}, {"kind": "dataclass", "name", "items", "order"} alike, or
{"kind": "constant", "value": int, float, str or bool}. `index` is the position among the flattened tensors.
Inputs have {"kind": "namedtuple", "name", "items", "order"} too, and a dict of forward's parameters at the root.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edgeopt.errors import CaptureError
from edgeopt.onboard.structure import restore

__all__ = ["Flat", "flatten", "restore"]

ROOT_NAME = "output"


class Flat(NamedTuple):
    """The tensors in depth-first order, a unique name for each, and the JSON structure around them."""

    tensors: list[Any]
    names: list[str]
    structure: dict[str, Any]


def flatten(output: Any, is_tensor: Callable[[Any], bool]) -> Flat:
    """Flatten what the user's model returned.

    Names are the path to each tensor joined by dots ('boxes', 'heads.0.mask'); 'output' stands for the root
    where there is no key: a lone tensor is 'output', the items of a tuple 'output.0', 'output.1'. Raises
    CaptureError for what no device can give back: other types, keys that are no strings, no tensor at all.
    """
    flat = Flat([], [], {})
    node = _flatten(output, (), is_tensor, flat)
    if not flat.tensors:
        raise CaptureError("the model returns no tensor", todo="return at least one tensor")
    return flat._replace(structure=node)


def _flatten(value: Any, path: tuple[str, ...], is_tensor: Callable[[Any], bool], flat: Flat) -> dict[str, Any]:
    def items(pairs) -> list:
        return [_flatten(item, (*path, str(key)), is_tensor, flat) for key, item in pairs]

    if is_tensor(value):
        flat.names.append(_unique(_name(path), flat.names))
        flat.tensors.append(value)
        return {"kind": "tensor", "index": len(flat.tensors) - 1}
    if value is None:
        return {"kind": "none"}
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return {"kind": "constant", "value": value}
    if isinstance(value, Mapping):  # before dataclasses: some libraries' outputs are both, and used as dicts
        _check_keys(value, path)
        return {"kind": "dict", **_ordered(list(value), items(value.items()))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {"kind": "dataclass", "name": type(value).__name__, **_ordered([k for k, _ in fields], items(fields))}
    if isinstance(value, tuple | list):
        return {"kind": "tuple" if isinstance(value, tuple) else "list", "items": items(enumerate(value))}
    raise CaptureError(
        f"the model returns a {type(value).__name__}, which no device can give back", where=_name(path),
        todo="return tensors in tuples, lists, dicts or dataclasses",
    )  # fmt: skip


def _ordered(keys: list[str], nodes: list) -> dict[str, Any]:
    """Canonical JSON sorts the keys of an object, so their order is kept beside them."""
    return {"items": dict(zip(keys, nodes, strict=True)), "order": keys}


def _check_keys(value: Mapping, path: tuple[str, ...]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise CaptureError(
                f"the model returns a dict with the key {key!r}",
                where=_name(path),
                todo="use strings as keys",
            )


def _name(path: tuple[str, ...]) -> str:
    parts = tuple(part or "_" for part in path)  # a key may be '', and a name may not
    return ".".join(parts if parts and not parts[0].isdigit() else (ROOT_NAME, *parts))


def _unique(name: str, taken: list[str]) -> str:
    """`name`, numbered where a key with a dot makes two paths read alike."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found
