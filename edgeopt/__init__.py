"""edgeopt: build, push and prove model artifacts for Jetson, desktop GPUs and CPUs.

Importing this package is cheap: neither torch, onnxruntime nor paramiko is imported until used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeopt.runtime import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "load":
        from edgeopt.runtime import load

        return load
    raise AttributeError(f"module 'edgeopt' has no attribute {name!r}")
