"""A rollout to many devices against one: time, and the memory of the operator's process.

    python benchmarks/rollout.py [--devices 200] [--few 10] [--mb 5] [--jobs 8] [--json]

The devices are sshd instances on loopback, one a device, each with a root of its own; the artifact holds --mb of random
bytes besides a tiny model, so that the transfer counts. All devices share this machine's cores and its lock for
measurements, so that validations take turns: the time per device is an upper bound. Memory is the largest resident set
of the process of `edgeopt rollout` (wait4), for few devices and for many; the goal is that it does not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

import loopback_sshd  # noqa: E402

from edgeopt.spec.yaml_file import to_yaml  # noqa: E402
from tests.tiny import tiny_artifact  # noqa: E402

GROWTH_MB = 16  # of the largest resident set from few devices to many: threads and records, no data


def start(folder: Path, count: int, stack: contextlib.ExitStack) -> Path:
    """`count` servers d0, d1 ...; the ssh_config that reaches them. Keys are made once: they are what takes time."""
    first = folder / "d0"
    lines = []
    for at in range(count):
        own = folder / f"d{at}"
        if at:
            own.mkdir()
            for name in ("host_key", "host_key.pub", "client_key", "client_key.pub"):
                (own / name).write_bytes((first / name).read_bytes())
                (own / name).chmod(0o600)
        stack.callback(loopback_sshd.down, own)
        server = loopback_sshd.up(own)
        lines.append(server.config.read_text().replace(f"Host {loopback_sshd.ALIAS}", f"Host d{at}"))
    path = folder / "ssh_config"
    path.write_text("\n".join(lines))
    return path


def roll(folder: Path, label: str, count: int, artifact: Path, config: Path, jobs: int) -> dict:
    """One rollout to `count` devices in one wave, in a process of its own: seconds, and its largest resident set."""
    fleet = folder / f"{label}.yaml"
    devices = [{"host": f"d{at}", "root": str(folder / f"d{at}" / label)} for at in range(count)]
    fleet.write_text(to_yaml({"defaults": {"python": sys.executable}, "devices": devices}))
    argv = [sys.executable, "-m", "edgeopt", "rollout", artifact, "--fleet", fleet, "--ssh-config", config, "--yes"]
    argv += ["--canary", 0, "--waves", "100%", "--jobs", jobs, "--threads", 1, "--json"]
    started = time.perf_counter()
    with open(folder / f"{label}.json", "w") as out, open(folder / f"{label}.log", "w") as log:
        child = subprocess.Popen([str(a) for a in argv], stdout=out, stderr=log, cwd=REPOSITORY)
        _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    if status != 0:
        raise SystemExit(f"the rollout to {count} failed: {(folder / f'{label}.log').read_text()[-2000:]}")
    active = [d for d in json.loads((folder / f"{label}.json").read_text())["devices"] if d["state"] == "active"]
    return {"devices": count, "active": len(active), "seconds": round(seconds, 2), "rss_mb": usage.ru_maxrss / 1024}


def measure(devices: int, few: int, mb: float, jobs: int) -> dict:
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        weights = {"weights.bin": os.urandom(int(mb * 1e6))}
        artifact = tiny_artifact(folder / "built", torchscript=False, metrics={}, cases=(), extra=weights).folder
        config = start(folder, devices, stack)
        counts = {"one": 1, "few": min(few, devices), "many": devices}
        return {label: roll(folder, label, count, artifact, config, jobs) for label, count in counts.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--mb", type=float, default=5)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measure(asked.devices, asked.few, asked.mb, asked.jobs)
    growth_mb = found["many"]["rss_mb"] - found["few"]["rss_mb"]
    met = growth_mb <= GROWTH_MB and found["many"]["active"] == asked.devices
    if asked.json:
        print(json.dumps({**found, "growth_mb": growth_mb, "met": met}))
        return 0 if met else 1
    print(f"artifact of {asked.mb:g} MB, {asked.jobs} devices at once, all on this machine")
    print(f"{'devices':>8}{'active':>8}{'s':>9}{'s a device':>12}{'of one':>8}{'RSS MiB':>9}")
    for row in found.values():
        each = row["seconds"] / row["devices"]
        of_one = row["seconds"] / found["one"]["seconds"]
        print(f"{row['devices']:8}{row['active']:8}{row['seconds']:9.1f}{each:12.2f}{of_one:8.1f}{row['rss_mb']:9.0f}")
    goal = f"at most {GROWTH_MB} MiB more for {asked.devices} devices than for {asked.few}"
    print(f"goal: {goal}: {growth_mb:.0f}, {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
