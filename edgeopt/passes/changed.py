"""What a pass says it did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Changed:
    """`count` places that a pass changed, and why it left others alone."""

    count: int
    declined: tuple[str, ...] = ()
