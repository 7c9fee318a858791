"""What an application imports on the host: artifacts, raw tensors, comparison, evaluation. No torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeopt.onboard.adaptive import AdaptiveModel
    from edgeopt.runtime.loading import load

__all__ = ["AdaptiveModel", "load"]


def __getattr__(name: str):
    if name == "load":
        from edgeopt.runtime.loading import load

        return load
    if name == "AdaptiveModel":
        from edgeopt.onboard.adaptive import AdaptiveModel

        return AdaptiveModel
    raise AttributeError(f"module 'edgeopt.runtime' has no attribute {name!r}")
