"""What an application imports on the host: artifacts, raw tensors, comparison, evaluation. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeopt.runtime.loading import load

__all__ = ["load"]


def __getattr__(name: str):
    if name == "load":
        from edgeopt.runtime.loading import load

        return load
    raise AttributeError(f"module 'edgeopt.runtime' has no attribute {name!r}")
