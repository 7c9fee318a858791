"""How long engines took to build on this device, in ROOT/engines/history.json, and what that says of the next one."""

import contextlib
import os

from . import processes

_KEPT = 50


def estimate_s(root, job):
    """Seconds that the build will take by earlier ones on this device, in proportion to the file; None without any."""
    rows = processes.read_json(os.path.join(root, "history.json")) or []
    alike = [r for r in rows if r["kind"] == _kind_of(job)] or rows
    rates = sorted(r["seconds"] / max(r["bytes"], 1) for r in alike)
    return rates[len(rates) // 2] * job["bytes"] if rates else None


def remember(root, job, seconds):
    """Note how long a build took."""
    path = os.path.join(root, "history.json")
    rows = (processes.read_json(path) or [])[1 - _KEPT :]
    with contextlib.suppress(OSError):
        processes.write_json(path, rows + [{"kind": _kind_of(job), "bytes": job["bytes"], "seconds": seconds}])


def _kind_of(job):
    return "+".join(list(job["recipe"]["flags"]) + (["dla"] if job["recipe"].get("dla") else []))
