"""How long `edgeopt --help` takes, and that it imports neither torch nor paramiko. Goal: under 0.20 s.

.venv/bin/python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from interleaved import compare, python, report

_HEAVY = ("torch", "paramiko", "numpy", "onnx", "onnxruntime", "pydantic")
_TIMED = """
import subprocess, sys, time
started = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(time.perf_counter() - started)
"""


def main(rounds: int = 15) -> None:
    code = "import sys, edgeopt.cli\ntry: edgeopt.cli.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    modules = subprocess.run(python(code), capture_output=True, text=True, check=True).stdout.split()
    imported = [name for name in _HEAVY if name in modules]
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "edgeopt", "--help"], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - started)
    against = compare(
        python(_TIMED, sys.executable, "-m", "edgeopt", "--help"), python(_TIMED, sys.executable, "-c", "pass")
    )
    report(
        "edgeopt --help",
        {
            "median_s": round(statistics.median(seconds), 3),
            "min_max_s": [round(min(seconds), 3), round(max(seconds), 3)],
            "times of an empty interpreter": round(against.ratio, 2),
            "heavy imports": imported or "none",
            "goal": "median under 0.20 s, neither torch nor paramiko",
        },
    )


if __name__ == "__main__":
    main()
