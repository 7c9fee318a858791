"""The benchmark of random cuts, a few of its thousand pushes: nothing lost, nothing partial, nothing left over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_pushes_with_random_cuts_lose_nothing(loopback):
    script = Path(__file__).parents[2] / "benchmarks" / "push_cuts.py"
    argv = [sys.executable, script, "--pushes", "4", "--mb", "0.5", "--json"]
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
    found = json.loads(done.stdout or "{}")
    assert found, done.stderr
    counts = found["counts"]
    assert (counts["lost"], counts["partial"], counts["left_over"]) == (0, 0, 0)
    assert counts["pushes"] == 4 and counts["cuts"] + counts["kills"] >= 4
    again = found["again"]
    assert again["unchanged"]["wire_bytes"] < 20_000 and again["unchanged"]["blobs_moved"] == 0
    assert again["one_file_changed"]["blobs_moved"] == 2  # and the manifest
    assert again["one_file_changed"]["wire_bytes"] < 0.2 * again["first"]["wire_bytes"]
