"""Figures as people read them: 602.3 M, 13.3 MiB, 12.5 %."""

from __future__ import annotations

_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(number: float, unit: str = "") -> str:
    """A count with its decimal prefix: '602.3 M', or '602.3 MFLOPs' with a unit."""
    for size, prefix in _COUNTS:
        if abs(number) >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()


def size(size_bytes: float) -> str:
    """Bytes with a binary unit: '13.3 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError


def percent(share: float) -> str:
    """A share of one: '12.5 %', '<0.1 %' for less."""
    return f"{100 * share:.1f} %" if share >= 0.0005 or share == 0 else "<0.1 %"
