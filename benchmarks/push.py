"""Push against scp, in turns, each in a process of its own, and the sha256 of what arrived checked after each.

    python benchmarks/push.py [--mb 200] [--slow-mb 20] [--rounds 5] [--only loopback] [--json]

`loopback`: an artifact of random bytes over a loopback sshd. `slow`: the same over 100 Mbit with 25 ms there and back
and 1 % loss each way, between two network namespaces (needs root and /dev/net/tun). `weights`: over that link, float32
weights that hold float16 values, which compress.
The push is timed whole (interpreter, opening the artifact, login, transfer, flush and hash on the device, release)
and once more as the seconds that it reports itself, from the lock to the release. scp neither flushes nor hashes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

import loopback_sshd  # noqa: E402
import numpy as np  # noqa: E402

from edgeopt import digest  # noqa: E402
from edgeopt.runtime.artifact import Artifact, publish  # noqa: E402
from edgeopt.spec.manifest import Candidate, Feed, File, Manifest, TensorSpec  # noqa: E402
from tests.machine import HOME, Machine  # noqa: E402
from tests.network import lab  # noqa: E402
from tests.relay import Relay  # noqa: E402

GOALS = {"loopback": 0.75, "slow": 0.95, "weights": 1.0}  # of scp's speed
GOAL_UNCHANGED_BYTES = 20_000
DELAY_MS, MBIT, LOSS = 12.5, 100, 0.01  # each way
WEIGHTS = "weights.onnx"


@dataclass(frozen=True)
class Way:
    """How a server is reached: `argv` runs a command at our end of the link; `home` is the device's, seen from here,
    and `there` is what it is called on the device.
    """

    config: Path
    alias: str
    home: Path
    there: str
    argv: Callable[[list], list]


def random_bytes(size_bytes: int) -> Iterator[bytes]:
    for at in range(0, size_bytes, 1 << 20):
        yield os.urandom(min(1 << 20, size_bytes - at))


def half_weights(size_bytes: int) -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    for at in range(0, size_bytes, 1 << 20):
        values = rng.normal(scale=0.05, size=min(1 << 20, size_bytes - at) // 4)
        yield values.astype(np.float16).astype(np.float32).tobytes()


def make_artifact(folder: Path, content: Iterator[bytes]) -> Artifact:
    """An artifact whose one file has that content."""
    staging = folder / "staging"
    staging.mkdir(parents=True)
    with open(staging / WEIGHTS, "wb") as f:
        f.writelines(content)
    file = File(sha256=digest.of_file(staging / WEIGHTS), size=(staging / WEIGHTS).stat().st_size)
    tensor = TensorSpec(name="x", dtype="float32", shape=(1,))
    manifest = Manifest(
        name="bench", profile="x86-cpu", target={}, inputs=(tensor,), outputs=(tensor,),
        output_structure={"kind": "tensor", "index": 0}, files={WEIGHTS: file},
        candidates=(Candidate(name="only", runtime="onnxruntime", precision="fp32", file=WEIGHTS),),
        reference=(Feed(inputs={}),),
    )  # fmt: skip
    return publish(staging, folder / "bench.edgeopt", manifest)


@contextlib.contextmanager
def over_loopback(folder: Path) -> Iterator[Way]:
    server = loopback_sshd.up(folder / "sshd")
    try:
        yield Way(server.config, loopback_sshd.ALIAS, server.home, str(server.home), lambda argv: argv)
    finally:
        loopback_sshd.down(folder / "sshd")


@contextlib.contextmanager
def over_slow_link(folder: Path) -> Iterator[Way]:
    with lab.slow_cable(delay_ms=DELAY_MS, mbit=MBIT, loss=LOSS) as link:
        machine = Machine(
            folder / "machine", loopback_sshd.find_sshd(), address=lab.DEVICE, net=link.device, port=22
        ).up()
        try:
            inside = functools.partial(lab.inside, link.host)
            yield Way(machine.config(), "device", machine.home, str(HOME), lambda argv: inside(*map(str, argv)))
        finally:
            machine.down()


def seconds_of(argv: list) -> tuple[float, str]:
    """(wall-clock seconds, stdout) of a process that must succeed."""
    started = time.perf_counter()
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, cwd=REPOSITORY)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, argv))} failed: {done.stderr}")
    return seconds, done.stdout


def moved_by_an_unchanged_push(push: list, config: Path) -> int:
    """Bytes on the wire, both ways, handshake included, counted by a relay before the server."""
    text = config.read_text()
    port = next(int(line.split()[1]) for line in text.splitlines() if line.split()[0] == "Port")
    with Relay(port) as relay:
        through = config.with_name("ssh_config_relay")
        name = f"  HostKeyAlias [127.0.0.1]:{port}\n"
        through.write_text(text.replace(f"Port {port}", f"Port {relay.port}") + name)
        seconds_of([through if part == config else part for part in push])
        return relay.total


def check(path: Path, expected: str, what: str) -> None:
    if digest.of_file(path) != expected:
        raise SystemExit(f"{what}: {path} is not what was sent")


def measure(scenario: str, size_bytes: int, rounds: int) -> dict:
    """Medians and ratios of one scenario."""
    content = half_weights if scenario == "weights" else random_bytes
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        os.chmod(folder, 0o755)
        way = stack.enter_context((over_loopback if scenario == "loopback" else over_slow_link)(folder))
        artifact = make_artifact(folder / "built", content(size_bytes))
        weights, sha256 = artifact.path(WEIGHTS), artifact.manifest.files[WEIGHTS].sha256
        scp = way.argv(["scp", "-q", "-F", way.config, weights, f"{way.alias}:{way.there}/by-scp"])
        push = [sys.executable, "-m", "edgeopt", "push", artifact.folder, way.alias]
        push = way.argv([*push, "--ssh-config", way.config, "--json"])
        times: dict[str, list[float]] = {"scp": [], "push": [], "push_reported": []}
        for _ in range(rounds):
            (way.home / "by-scp").unlink(missing_ok=True)
            times["scp"].append(seconds_of(scp)[0])
            check(way.home / "by-scp", sha256, "scp")
            shutil.rmtree(way.home / ".edgeopt", ignore_errors=True)
            whole, said = seconds_of(push)
            times["push"].append(whole)
            times["push_reported"].append(json.loads(said)["seconds"])
            check(way.home / ".edgeopt" / "bench" / "releases" / artifact.digest / WEIGHTS, sha256, "push")
        unchanged = moved_by_an_unchanged_push(push, way.config) if scenario == "loopback" else None
    median_s = {name: statistics.median(values) for name, values in times.items()}
    ratio = median_s["scp"] / median_s["push"]
    return {
        "scenario": scenario, "size_bytes": size_bytes, "rounds": rounds, "median_s": median_s, "seconds": times,
        "ratio": ratio, "ratio_reported": median_s["scp"] / median_s["push_reported"], "goal": GOALS[scenario],
        "unchanged_bytes": unchanged,
        "met": ratio >= GOALS[scenario] and (unchanged or 0) < GOAL_UNCHANGED_BYTES,
    }  # fmt: skip


def show(found: dict) -> None:
    if "not_measured" in found:
        print(f"{found['scenario']}: not measured: {found['not_measured']}")
        return
    mb = found["size_bytes"] / 1e6
    print(f"{found['scenario']}: {mb:g} MB, medians of {found['rounds']} rounds in turns")
    print(f"{'':24}{'s':>8}{'MB/s':>8}{'of scp':>8}")
    for name, seconds in found["median_s"].items():
        ratio = found["median_s"]["scp"] / seconds
        print(f"{name.replace('_', ', as '):24}{seconds:8.2f}{mb / seconds:8.1f}{ratio:8.2f}")
    said = "met" if found["ratio"] >= found["goal"] else "missed"
    print(f"goal: push at {found['goal']} of scp or more: {said}")
    if found["unchanged_bytes"] is not None:
        print(f"unchanged push: {found['unchanged_bytes']} bytes on the wire, goal under {GOAL_UNCHANGED_BYTES}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=200, help="over loopback")
    parser.add_argument("--slow-mb", type=int, default=20, help="over the slow link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(GOALS), help="one scenario of the three")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = []
    for scenario in [asked.only] if asked.only else GOALS:
        size_bytes = (asked.mb if scenario == "loopback" else asked.slow_mb) * 1_000_000
        try:
            results.append(measure(scenario, size_bytes, asked.rounds))
        except lab.Absent as why:
            results.append({"scenario": scenario, "met": False, "not_measured": str(why)})
        if not asked.json:
            show(results[-1])
    if asked.json:
        print(json.dumps({"scenarios": results, "met": all(r["met"] for r in results)}))
    return 0 if all(r["met"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
