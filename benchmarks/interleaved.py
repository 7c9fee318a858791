"""Two programs compared fairly: each run in a process of its own, in turns, and the ratio taken pair by pair."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Comparison:
    """Figures of A and of B, a pair a round; what they measure is the caller's business."""

    a: list[float]
    b: list[float]

    @property
    def ratio(self) -> float:
        """Median over the pairs of A / B."""
        return statistics.median(x / y for x, y in zip(self.a, self.b, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Least and largest A / B of a pair: the noise of this machine, in this run."""
        ratios = [x / y for x, y in zip(self.a, self.b, strict=True)]
        return min(ratios), max(ratios)


def compare(a: Sequence[str], b: Sequence[str], *, rounds: int = 7) -> Comparison:
    """Run A and B in turns; each prints one number as its last line of stdout."""
    figures: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            figures[which].append(number((a, b)[which]))
    return Comparison(*figures)


def number(argv: Sequence[str]) -> float:
    """The number that a process prints as its last line."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def python(code: str, *args: str) -> list[str]:
    """The argv that runs `code` in this interpreter."""
    return [sys.executable, "-c", code, *args]


def machine() -> str:
    """The machine that the figures are of."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def report(title: str, rows: dict[str, object]) -> None:
    """Print a table of figures, and the same as one line of JSON."""
    print(title)
    print(f"  machine: {machine()}")
    for name, value in rows.items():
        print(f"  {name}: {value}")
    print(json.dumps({"benchmark": title, "machine": machine(), **rows}, default=str))
