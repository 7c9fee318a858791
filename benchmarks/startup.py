"""How long `edgeopt --help` takes, and until an application has loaded an artifact, and what they import.

Goals: `--help` under 0.20 s; `import edgeopt.runtime` and `load` of an onnxruntime artifact under 0.5 s, without torch.

.venv/bin/python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from interleaved import compare, python, report

_HEAVY = ("torch", "paramiko", "numpy", "onnx", "onnxruntime", "pydantic")
_TIMED = """
import subprocess, sys, time
started = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(time.perf_counter() - started)
"""

_LOAD = """
import sys
from edgeopt.runtime import load
load(sys.argv[1]).close()
print(*(name for name in ("torch", "paramiko", "onnx", "openvino") if name in sys.modules))
"""


def main(rounds: int = 15) -> None:
    help_text(rounds)
    loading(rounds)


def loading(rounds: int) -> None:
    """From the start of the interpreter to a loaded artifact: a small one, whose own time is next to nothing."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.tiny import tiny_artifact

    with tempfile.TemporaryDirectory() as folder:
        artifact = str(tiny_artifact(folder, torchscript=False).folder)
        argv = python(_LOAD, artifact)
        heavy = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
        against = compare(python(_TIMED, *argv), python(_TIMED, sys.executable, "-c", "pass"), rounds=rounds)
    report(
        "import edgeopt.runtime and load an onnxruntime artifact",
        {
            "median_s": round(statistics.median(against.a), 3),
            "min_max_s": [round(min(against.a), 3), round(max(against.a), 3)],
            "of it an empty interpreter": round(statistics.median(against.b), 3),
            "heavy imports": heavy or "none",
            "goal": "median under 0.5 s, no torch",
        },
    )


def help_text(rounds: int) -> None:
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
