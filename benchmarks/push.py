"""Push against scp: an artifact of 200 MB over a loopback sshd, in turns, each in a process of its own.

    python benchmarks/push.py [--mb 200] [--rounds 5] [--json]

The push is timed whole (interpreter, opening the artifact, login, transfer, flush and hash on the device, release)
and once more as the seconds that it reports itself, from the lock to the release. scp neither flushes nor hashes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

import loopback_sshd  # noqa: E402

from edgeopt import digest  # noqa: E402
from edgeopt.runtime.artifact import Artifact, publish  # noqa: E402
from edgeopt.spec.manifest import Candidate, Feed, File, Manifest, TensorSpec  # noqa: E402

GOAL_RATIO = 0.6
GOAL_UNCHANGED_BYTES = 20_000


def make_artifact(folder: Path, size_bytes: int) -> Artifact:
    """An artifact whose one file is random, so that nothing compresses."""
    staging = folder / "staging"
    staging.mkdir(parents=True)
    with open(staging / "weights.onnx", "wb") as f:
        for _ in range(0, size_bytes, 1 << 20):
            f.write(os.urandom(min(1 << 20, size_bytes - f.tell())))
    file = File(sha256=digest.of_file(staging / "weights.onnx"), size=size_bytes)
    tensor = TensorSpec(name="x", dtype="float32", shape=(1,))
    manifest = Manifest(
        name="bench", profile="x86-cpu", target={}, inputs=(tensor,), outputs=(tensor,),
        output_structure={"kind": "tensor", "index": 0}, files={"weights.onnx": file},
        candidates=(Candidate(name="only", runtime="onnxruntime", precision="fp32", file="weights.onnx"),),
        reference=(Feed(inputs={}),),
    )  # fmt: skip
    return publish(staging, folder / "bench.edgeopt", manifest)


def seconds_of(argv: list) -> tuple[float, str]:
    """(wall-clock seconds, stdout) of a process that must succeed."""
    started = time.perf_counter()
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{argv[0]} failed: {done.stderr}")
    return seconds, done.stdout


def moved_by_an_unchanged_push(push: list, config: Path, port: int) -> int:
    """Bytes on the wire, both ways, handshake included, counted by a relay before the server."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from relay import Relay

    with Relay(port) as relay:
        through = config.with_name("ssh_config_relay")
        name = f"  HostKeyAlias [127.0.0.1]:{port}\n"
        through.write_text(config.read_text().replace(f"Port {port}", f"Port {relay.port}") + name)
        seconds_of([through if part == config else part for part in push])
        return relay.total


def measure(size_bytes: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sshd = loopback_sshd.up(folder / "sshd")
        try:
            artifact = make_artifact(folder / "built", size_bytes)
            to, root = sshd.home / "by-scp", sshd.home / "root"
            weights = artifact.path("weights.onnx")
            scp = ["scp", "-q", "-F", sshd.config, weights, f"{loopback_sshd.ALIAS}:{to}"]
            push = [sys.executable, "-m", "edgeopt", "push", artifact.folder, loopback_sshd.ALIAS]
            push += ["--root", root, "--ssh-config", sshd.config, "--json"]
            times: dict[str, list[float]] = {"scp": [], "push": [], "push_reported": []}
            for _ in range(rounds):
                to.unlink(missing_ok=True)
                times["scp"].append(seconds_of(scp)[0])
                shutil.rmtree(root, ignore_errors=True)
                whole, said = seconds_of(push)
                times["push"].append(whole)
                times["push_reported"].append(json.loads(said)["seconds"])
            unchanged_bytes = moved_by_an_unchanged_push(push, sshd.config, sshd.port)
        finally:
            loopback_sshd.down(folder / "sshd")
    median_s = {name: statistics.median(values) for name, values in times.items()}
    return {
        "size_bytes": size_bytes, "rounds": rounds, "median_s": median_s,
        "ratio": median_s["scp"] / median_s["push"],
        "ratio_reported": median_s["scp"] / median_s["push_reported"],
        "unchanged_bytes": unchanged_bytes,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measure(asked.mb * 1_000_000, asked.rounds)
    met = found["ratio"] >= GOAL_RATIO and found["unchanged_bytes"] < GOAL_UNCHANGED_BYTES
    if asked.json:
        print(json.dumps({**found, "met": met}))
        return 0 if met else 1
    print(f"{asked.mb} MB over loopback, medians of {asked.rounds} rounds in turns")
    print(f"{'':24}{'s':>8}{'MB/s':>8}{'of scp':>8}")
    for name, seconds in found["median_s"].items():
        ratio = found["median_s"]["scp"] / seconds
        print(f"{name.replace('_', ', as '):24}{seconds:8.2f}{asked.mb / seconds:8.0f}{ratio:8.2f}")
    print(f"goal: push at {GOAL_RATIO} of scp or more: {'met' if found['ratio'] >= GOAL_RATIO else 'missed'}")
    print(f"unchanged push: {found['unchanged_bytes']} bytes on the wire, goal under {GOAL_UNCHANGED_BYTES}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
