"""Pushes cut at random moments over a loopback sshd: what is lost, and whether a partial release is ever visible.

    python benchmarks/push_cuts.py [--pushes 1000] [--mb 2] [--seed 0] [--json]

Each push is of a new artifact, to a device that runs an earlier one. Its connection is cut after a random number of
bytes, or the pushing process is killed (SIGKILL) after a random time; then it is pushed again, cut again with the same
chance, until it goes through and is activated. After every cut: every visible blob is hashed, every visible release is
opened (all its files are hashed), and `current` must be the release of before. At the end every release that is kept
and every blob is hashed once more, and nothing may be left over.

Exit status 1 where anything was lost or partial. Also measured, with bytes counted at the connection: the same artifact
pushed again, and one of which one file changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts"), str(REPOSITORY / "tests")]

import loopback_sshd  # noqa: E402
from relay import Relay  # noqa: E402

from edgeopt import digest  # noqa: E402
from edgeopt.errors import EdgeoptError, LockedError  # noqa: E402
from edgeopt.flows.activate import activate  # noqa: E402
from edgeopt.flows.push import push  # noqa: E402
from edgeopt.flows.status import collect, status  # noqa: E402
from edgeopt.ports.connect import connect  # noqa: E402
from edgeopt.runtime.artifact import Artifact, publish  # noqa: E402
from edgeopt.spec.manifest import Candidate, Feed, File, Manifest, TensorSpec  # noqa: E402

GOAL_UNCHANGED_BYTES, GOAL_UNCHANGED_S = 20_000, 1.0
CHANCE_OF_ANOTHER_CUT = 0.3
KILLED_SHARE = 0.2  # of the cuts are a killed process


@dataclass
class Counts:
    """What happened in all pushes."""

    pushes: int = 0
    cuts: int = 0
    kills: int = 0
    resumed: int = 0  # went on in the middle of a file
    lost: int = 0  # the release that ran was not there, or not whole
    partial: int = 0  # a blob or release was visible and not what its name says
    left_over: int = 0  # after garbage was collected


def make_artifact(folder: Path, chance: random.Random, size_bytes: int, shared: bytes) -> Artifact:
    """An artifact of two files: one that all share, and one of its own, half of which shrinks."""
    staging = folder / "staging"
    staging.mkdir(parents=True)
    (staging / "shared.bin").write_bytes(shared)
    own = chance.randbytes(size_bytes // 2)
    (staging / "weights.onnx").write_bytes(own + bytes(b & 0x1F for b in own))
    files = {
        name: File(sha256=digest.of_file(staging / name), size=(staging / name).stat().st_size)
        for name in ("shared.bin", "weights.onnx")
    }
    tensor = TensorSpec(name="x", dtype="float32", shape=(1,))
    manifest = Manifest(
        name="cuts", profile="x86-cpu", target={}, inputs=(tensor,), outputs=(tensor,),
        output_structure={"kind": "tensor", "index": 0}, files=files,
        candidates=(Candidate(name="only", runtime="onnxruntime", precision="fp32", file="weights.onnx"),),
        reference=(Feed(inputs={}),),
    )  # fmt: skip
    return publish(staging, folder / "cuts.edgeopt", manifest)


def look(root: Path, running: str | None, counts: Counts) -> None:
    """Hash everything that is visible."""
    for blob in (root / "blobs").rglob("*"):
        if blob.is_file() and not blob.name.endswith(".part"):
            counts.partial += digest.of_file(blob) != blob.name
    for release in (root / "cuts" / "releases").glob("[0-9a-f]*"):
        try:
            counts.partial += Artifact.open(release).digest != release.name
        except EdgeoptError:
            counts.partial += 1
    if running is not None:
        try:
            counts.lost += Artifact.open(root / "cuts" / "current").digest != running
        except EdgeoptError:
            counts.lost += 1


def push_and_cut(artifact: Artifact, root: Path, config: Path, relay: Relay, chance: random.Random, counts: Counts):
    """One push that is cut at a random moment, unless it is faster."""
    size = sum(file.size for file in artifact.manifest.files.values())
    relay.reset()
    if chance.random() < KILLED_SHARE:
        counts.kills += 1
        argv = [sys.executable, "-m", "edgeopt", "push", str(artifact.folder), "device", "--root", str(root)]
        child = subprocess.Popen(
            [*argv, "--ssh-config", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        after = chance.randrange(size)
        deadline = time.monotonic() + 60
        while child.poll() is None and relay.to_server < after and time.monotonic() < deadline:
            time.sleep(0.001)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        child.wait()
        return
    counts.cuts += 1
    relay.cut_after = chance.randrange(1000, size)
    try:
        with connect("device", config=config) as device:
            push(artifact, device, root=str(root), keep=1)
    except EdgeoptError:
        pass
    finally:
        relay.cut_after = None


def finish(artifact: Artifact, root: Path, config: Path, counts: Counts) -> None:
    """Push without a cut, and activate; what the cut left on the device may still be ending."""
    sizes = [file.size for file in artifact.manifest.files.values()]
    sizes.append((artifact.folder / "manifest.json").stat().st_size)
    of_whole_files = {sum(some) for n in range(len(sizes) + 1) for some in itertools.combinations(sizes, n)}
    with connect("device", config=config) as device:
        done = push(artifact, device, root=str(root), keep=1, wait_s=60)
        counts.resumed += done.moved_bytes not in of_whole_files
        activate(device, "cuts", artifact.digest, root=str(root), wait_s=60)
        # an hour is what a push waits before it removes a blob that nobody links to; here it would never pass
        for blob in (root / "blobs").rglob("*"):
            if blob.is_file():
                os.utime(blob, (1000, 1000))


def measure_cuts(server, folder: Path, pushes: int, size_bytes: int, seed: int) -> Counts:
    chance = random.Random(seed)
    counts = Counts()
    root = server.home / "root"
    shared = chance.randbytes(size_bytes // 4)
    running = None
    with Relay(server.port) as relay:
        config = _config(server, folder / "relayed", relay.port)
        straight = _config(server, folder / "straight", server.port)
        for i in range(pushes):
            artifact = make_artifact(folder / f"built{i}", chance, size_bytes, shared)
            counts.pushes += 1
            while True:
                push_and_cut(artifact, root, config, relay, chance, counts)
                if root.exists():
                    look(root, running, counts)
                if chance.random() > CHANCE_OF_ANOTHER_CUT:
                    break
            finish(artifact, root, straight, counts)
            running = artifact.digest
            look(root, running, counts)
            shutil.rmtree(folder / f"built{i}")
    with connect("device", config=straight) as device:
        _collect(device, root)
        counts.left_over = len(status(device, root=str(root)).leftovers)
    look(root, running, counts)
    return counts


def _collect(device, root: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            collect(device, root=str(root))
            return
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _config(server, path: Path, port: int) -> Path:
    path.write_text(
        f"Host device\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias [127.0.0.1]:{server.port}\n"
        f'  IdentityFile "{server.folder}/client_key"\n  IdentitiesOnly yes\n'
        f'  UserKnownHostsFile "{server.known_hosts}"\n'
    )
    return path


def measure_again(server, folder: Path, size_bytes: int) -> dict:
    """Bytes on the wire, both ways and the handshake included, and seconds that the push itself reports."""
    chance = random.Random(1)
    root = server.home / "again"
    shared = chance.randbytes(size_bytes)
    found = {}
    with Relay(server.port) as relay:
        config = _config(server, folder / "again", relay.port)
        first = make_artifact(folder / "first", chance, 400_000, shared)
        changed = make_artifact(folder / "changed", chance, 400_000, shared)
        for name, artifact in (("first", first), ("unchanged", first), ("one_file_changed", changed)):
            relay.reset()
            started = time.perf_counter()
            with connect("device", config=config) as device:
                done = push(artifact, device, root=str(root))
            found[name] = {
                "wire_bytes": relay.total, "moved_bytes": done.moved_bytes, "blobs_moved": done.blobs_moved,
                "seconds": time.perf_counter() - started,
            }  # fmt: skip
    return found


def measure(pushes: int, size_bytes: int, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server = loopback_sshd.up(folder / "sshd")
        try:
            again = measure_again(server, folder, 10 * size_bytes)
            counts = measure_cuts(server, folder, pushes, size_bytes, seed)
        finally:
            loopback_sshd.down(folder / "sshd")
    return {"counts": asdict(counts), "again": again}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--mb", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measure(asked.pushes, int(asked.mb * 1_000_000), asked.seed)
    counts, unchanged = found["counts"], found["again"]["unchanged"]
    whole = not (counts["lost"] or counts["partial"] or counts["left_over"])
    small = unchanged["wire_bytes"] < GOAL_UNCHANGED_BYTES and unchanged["seconds"] < GOAL_UNCHANGED_S
    if asked.json:
        print(json.dumps({**found, "met": whole and small}))
        return 0 if whole and small else 1
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    print(f"nothing lost, nothing partial, nothing left over: {'met' if whole else 'MISSED'}")
    for name, push_ in found["again"].items():
        print(
            f"{name.replace('_', ' '):18}{push_['wire_bytes']:>12} bytes on the wire, {push_['blobs_moved']} blobs, "
            f"{push_['seconds']:.2f} s"
        )
    print(f"unchanged under {GOAL_UNCHANGED_BYTES} bytes and {GOAL_UNCHANGED_S:g} s: {'met' if small else 'missed'}")
    return 0 if whole and small else 1


if __name__ == "__main__":
    sys.exit(main())
