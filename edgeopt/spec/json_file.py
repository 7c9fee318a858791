"""JSON from somewhere that is not trusted: a manifest that was copied, a device's response, a file beside an artifact.

Stricter than JSON itself, so that what was read can be written again and means one thing: UTF-8, no key twice, no NaN
or infinity, no number beyond 64 bits, no half of a surrogate pair, nothing nested deeper than `MAX_DEPTH`.
"""

from __future__ import annotations

import json
import math
from typing import Any

from edgeopt.errors import EdgeoptError

MAX_DEPTH = 64
_MAX_INT = 1 << 63


def read(data: bytes, *, what: str, source: str, error: type[EdgeoptError], todo: str) -> Any:
    """The value of the JSON document `data`; `error` says that `what` is not JSON, why, and names `source`."""
    try:
        value = json.loads(
            data.decode("utf-8"), parse_int=_int, parse_float=_float, parse_constant=_constant,
            object_pairs_hook=_object,
        )  # fmt: skip
        _check(value)
    except RecursionError:
        raise error(f"{what} is not JSON: it is nested too deeply", where=source, todo=todo) from None
    except ValueError as why:
        raise error(f"{what} is not JSON: {why}", where=source, todo=todo) from None
    return value


def _int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= _MAX_INT:
        raise ValueError(f"the number {text[:24]}... is too large")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:24]} is too large")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return value


def _check(value: Any) -> None:
    """Walks without recursion: what nests deeply is what it looks for."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(item, str):
            item.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
        elif isinstance(item, dict):
            for key, inner in item.items():
                key.encode()
                waiting.append((inner, depth + 1))
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in item]
