"""sha256 of files and of canonical JSON: the one way in which edgeopt names content."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


def of_bytes(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def of_file(path: Path | str) -> str:
    """Hex sha256 of the file's bytes, read in chunks of 1 MiB."""
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(_CHUNK):
            h.update(chunk)
    return h.hexdigest()


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no white space: equal values give equal bytes. NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def finite(value: Any) -> Any:
    """JSON data with None for every NaN and infinity, which JSON has no numbers for (an SQNR of equal outputs)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def of_value(value: Any) -> str:
    """Hex sha256 of `canonical_json(value)`."""
    return of_bytes(canonical_json(value))
