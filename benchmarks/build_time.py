"""EfficientNet-Lite0: a cold post-training build, and an unchanged rebuild that imports neither torch nor user code.

    scripts/fetch-zoo && .venv/bin/python benchmarks/build_time.py

Goals: cold under 60 s, unchanged under 1 s.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from interleaved import report

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "examples" / "imagenet"
ARTIFACT = ROOT / ".zoo" / "built" / "efficientnet-lite0.edgeopt"
ARGS = [
    "build", "--profile", "x86-cpu", "--project", str(PROJECT / "efficientnet_lite0.yaml"), "--out", str(ARTIFACT),
]  # fmt: skip


def seconds() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "edgeopt", *ARGS], check=True, stdout=sys.stderr)
    return time.perf_counter() - started


def imported_by_rebuild() -> list[str]:
    """Which of torch and the user's modules an unchanged rebuild imports."""
    code = (
        "import sys, edgeopt.cli\n"
        "try: edgeopt.cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('MODULES', *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, *ARGS], capture_output=True, text=True, check=True).stdout
    modules = out.split("MODULES")[1].split()
    return [name for name in ("torch", "model", "data") if name in modules]


def main() -> None:
    shutil.rmtree(PROJECT / ".edgeopt", ignore_errors=True)
    shutil.rmtree(ARTIFACT, ignore_errors=True)
    cold = seconds()
    again = [seconds() for _ in range(5)]
    report(
        "EfficientNet-Lite0, x86-cpu build",
        {
            "cold_s": round(cold, 1),
            "unchanged_s": round(statistics.median(again), 2),
            "unchanged_min_max_s": [round(min(again), 2), round(max(again), 2)],
            "an unchanged rebuild imports": imported_by_rebuild() or "neither torch nor user code",
            "goal": "cold under 60 s, unchanged under 1 s",
        },
    )


if __name__ == "__main__":
    main()
