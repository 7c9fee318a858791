"""A runner's response, before anything is computed from it: a device may answer less, or other, than was asked.

JSON and its types are checked by the reader; what is checked here is that the answer is one to this request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgeopt.errors import DeviceError
from edgeopt.spec.manifest import Candidate, TensorRef

MAX_RESPONSE_BYTES = 256 << 20


def check_response(
    runs: Mapping[str, Any], noise: Mapping[str, Any] | None, candidates: Sequence[Candidate], label: str
) -> None:
    """DeviceError where a candidate is missing in `runs`, failed without a reason, or has a time that is none.

    `runs`: candidate -> device.runner.Run, and `noise`, as the device gave them.
    """
    for key in ("busy_rounds", "others", "steal"):
        if not isinstance((noise or {}).get(key) or 0, int | float):
            raise _wrong(f"has a '{key}' that is no number", label)
    for candidate in candidates:
        name, run = candidate.name, runs.get(candidate.name)
        if run is None:
            raise _wrong(f"says nothing of the candidate '{name}'", label)
        if (run.status == "ok") != (run.failure is None):
            raise _wrong(f"both has and has not a failure of '{name}'", label)
        if not all(math.isfinite(second) and second >= 0 for second in run.calls_s):
            raise _wrong(f"has a call of '{name}' that took less than no time", label)


def outputs_of(run: Any, candidate: str, feed: str) -> Mapping[str, TensorRef]:
    """Where the outputs of one feed lie. DeviceError where the device gave none."""
    found = run.outputs.get(feed, {})
    if not found:
        raise _wrong(f"has no outputs of '{candidate}' for '{feed}'", None)
    return found


def _wrong(what: str, label: str | None) -> DeviceError:
    return DeviceError(
        f"the runner's response {what}", where=label,
        todo="push the artifact again: its runner and this edgeopt may differ in version",
    )  # fmt: skip
