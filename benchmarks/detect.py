"""How long `detect` takes over a loopback sshd, and how many logins it makes: goal below 1.5 s and one.

    python benchmarks/detect.py [--rounds 10] [--json]

The command in a process of its own, whole: interpreter, login, round trip, profiles. And the facts alone, from the
login on, in this process. Logins are counted in the server's log.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

import loopback_sshd  # noqa: E402

from edgeopt.device import facts  # noqa: E402
from edgeopt.ports.connect import connect  # noqa: E402

GOAL_S = 1.5


def measure(rounds: int) -> dict:
    command_s, facts_s = [], []
    with tempfile.TemporaryDirectory() as scratch:
        sshd = loopback_sshd.up(Path(scratch) / "sshd")
        try:
            for _ in range(rounds):
                argv = [sys.executable, "-m", "edgeopt", "detect", loopback_sshd.ALIAS, "--json"]
                begin = time.perf_counter()
                done = subprocess.run(
                    [*argv, "--ssh-config", str(sshd.config)], cwd=REPOSITORY, capture_output=True, text=True
                )
                command_s.append(time.perf_counter() - begin)
                if done.returncode != 0 or not json.loads(done.stdout)["facts"]["memory_bytes"]:
                    raise SystemExit(f"detect failed: {done.stderr}")
            logins = (sshd.folder / "sshd.log").read_text().count("Accepted publickey")
            for _ in range(rounds):
                begin = time.perf_counter()
                with connect(loopback_sshd.ALIAS, config=sshd.config) as device:
                    facts.read(device)
                facts_s.append(time.perf_counter() - begin)
        finally:
            loopback_sshd.down(sshd.folder)
    return {
        "rounds": rounds, "command_s": _spread(command_s), "facts_s": _spread(facts_s), "logins": logins / rounds,
    }  # fmt: skip


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measure(asked.rounds)
    met = found["command_s"]["median"] < GOAL_S and found["logins"] == 1
    if asked.json:
        print(json.dumps({**found, "met": met}))
        return 0 if met else 1
    for name, words in (("command_s", "the command"), ("facts_s", "the facts alone")):
        print(f"{words:18}" + ", ".join(f"{key} {value:.2f} s" for key, value in found[name].items()))
    print(f"logins a command: {found['logins']:g}; goal under {GOAL_S} s and one: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
