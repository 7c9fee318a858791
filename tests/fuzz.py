"""Damage of real files and answers, for every reader of what comes from elsewhere: an EdgeoptError or a value, no more.

    python -m tests.fuzz [--seconds 600] [--seed 1] [TARGET ...]      # a long run; what it finds is named with its seed

Each target is a valid input and the reader of it. Inputs are damaged by bytes and by tokens: bits flipped, pieces cut,
doubled or put elsewhere, numbers and strings replaced by those that hurt.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeopt.device import measured, runner
from edgeopt.device.response import check_response
from edgeopt.errors import EdgeoptError
from edgeopt.flows import journal, policy, sign, status
from edgeopt.flows.pack import pack, unpack
from edgeopt.flows.place import parse_state
from edgeopt.ports import blobs, known_hosts
from edgeopt.ports.connection import Connection, Result
from edgeopt.ports.known_hosts import HostKey
from edgeopt.runtime.artifact import Artifact
from edgeopt.runtime.tensors import PackWriter, read
from edgeopt.spec import manifest as spec
from edgeopt.spec import statement
from tests.tiny import expected, tiny_artifact

_NUMBERS = (b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"1e308", b"9223372036854775808", b"9" * 30, b"0.5", b"null",
            b'"x"', b"true", b"[]", b"{}", b"1099511627776", b"18446744073709551615")  # fmt: skip
_STRINGS = (b'"../../evil"', b'"/etc/evil"', b'""', b'"\\ud800"', b'"\\u0000"', b'"a/../b"', b'"."', b"null", b"1",
            b"[]",
            b'"' + b"a" * 3000 + b'"', b'"manifest.json"', b'"\xff\xfe"', b'"\xe2\x80\xaeevil"', b"{}")  # fmt: skip
_PIECES = (
    b"[" * 3000,
    b'{"a":' * 2000,
    b"\0",
    b"\n",
    b"\xff",
    b"../",
    b" ",
    b",",
    b'"',
    b"x" * 5000,
    b"\r",
    b"\xe2\x80\xa8",
)


@dataclass(frozen=True)
class Target:
    """A reader, and inputs that it takes."""

    valid: tuple[bytes, ...]
    read: Callable[[bytes], object]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to four damages."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_DAMAGES)(data, rng)
    return data


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\x80"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _remove(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 2, 10, 512)) :]


def _double(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.choice((1, 20, 512, 1024))]
    at = rng.randrange(len(data) + 1)
    return data[:at] + piece + data[at:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_PIECES) + data[at:]


def _token(pattern: bytes, others: tuple[bytes, ...]):
    def replace(data: bytes, rng: random.Random) -> bytes:
        found = list(itertools.islice(re.finditer(pattern, data), 3000))
        if not found:
            return _flip(data, rng)
        at = rng.choice(found)
        return data[: at.start()] + rng.choice(others) + data[at.end() :]

    return replace


_DAMAGES = (_flip, _flip, _cut, _remove, _double, _insert, _token(rb"-?\d+(?:\.\d+)?", _NUMBERS),
            _token(rb'"[^"]*"', _STRINGS),
            _token(rb"[a-z0-9./-]{3,}", tuple(s.strip(b'"') for s in _STRINGS)))  # fmt: skip


class Device(Connection):
    """A device that answers every command with `answer`."""

    label = "fuzzed"

    def __init__(self, answer: bytes):
        self._answer = answer

    def run(self, argv, *, stdin=b"", stdout=None, timeout_s=60, check=True, advance=None) -> Result:
        if stdout is not None:
            stdout.write(self._answer)
        return Result(0, self._answer, b"")

    def hold(self, argv, **how):
        raise NotImplementedError

    def reach(self) -> None:
        pass

    def close(self) -> None:
        pass


def targets(folder: Path) -> dict[str, Target]:
    """Every target by name; the files that they need are made in `folder`, which they leave as it is."""
    artifact = tiny_artifact(folder / "made", torchscript=False)
    version, when = 7, "2026-12-01T00:00:00Z"
    signed = statement.encode(artifact.manifest, version, when)
    (artifact.folder / spec.STATEMENT_NAME).write_bytes(signed)
    (artifact.folder / spec.SIGNATURE_NAME).write_bytes(b"-----BEGIN SSH SIGNATURE-----\nAAAA\n")
    manifest = (artifact.folder / "manifest.json").read_bytes()
    packed = Path(pack(artifact, folder / "packed.tar").path).read_bytes()
    found: dict[str, Target] = {
        "manifest": Target((manifest,), lambda data: _manifest(data)),
        "artifact": Target((manifest,), lambda data: _opened(artifact, folder / "opened", data)),
        "archive": Target((packed,), lambda data: _unpacked(folder / "unpacked", data)),
        "statement": Target((signed,), lambda data: statement.decode(data, artifact.manifest, source="fuzz")),
        "policy": Target(
            (b"edgeopt-policy 1\nrequire signature\nidentity a@b\nverify device\nverifier /usr/bin/edgeopt-verify\n",),
            lambda data: str(policy.read(Device(data))),
        ),
        "response": _response_target(artifact, folder),
        "survey": Target(
            (f"{'a' * 64} 0 -\n{'b' * 64} 10 {'c' * 64}\nprogram zstd\nlinked\ninodes 5 10\n"
             "/dev/sda1 100 50 50 50% /\n".encode(),),
            lambda data: blobs.BlobStore(Device(data), "/r", owner="o").survey({"a" * 64: 1, "b" * 64: 20}),
        ),
        "state": Target(
            (f"current releases/{'a' * 64}\nrelease {'a' * 64}\n".encode(),), lambda data: parse_state(_text(data))
        ),
        "journal": Target(
            (journal.line("n", "push", "a" * 64, "done").encode() + b"\n",), lambda data: journal.parse(_text(data))
        ),
        "status": Target((_status_lines(manifest),), _status),
        "known_hosts": Target(_known_hosts(), lambda data: _known(folder, data)),
    }  # fmt: skip
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _manifest(data: bytes) -> None:
    found = spec.decode(data, source="fuzz")
    spec.digest(found)
    for path in found.files:
        assert not os.path.isabs(path) and ".." not in Path(path).parts, path


def _opened(artifact: Artifact, folder: Path, data: bytes) -> None:
    """An artifact whose manifest somebody changed: opened, and every tensor that it names read."""
    if not folder.exists():
        shutil.copytree(artifact.folder, folder)
    (folder / "manifest.json").write_bytes(data)
    opened = Artifact.open(folder)
    sign.not_covered(opened)
    for feed in (*opened.manifest.reference, *opened.manifest.cases):
        for ref in (*feed.inputs.values(), *feed.outputs.values()):
            read(folder, ref)


def _unpacked(folder: Path, data: bytes) -> None:
    """A damaged archive: it gives the whole artifact, or nothing is there, and never anything beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "in.tar").write_bytes(data)
    try:
        unpack(inner / "in.tar", inner / "out")
    except EdgeoptError:
        assert sorted(os.listdir(inner)) == ["in.tar"]
        raise
    finally:
        assert os.listdir(folder) == ["a"] and os.listdir(folder / "a") == ["b"]
        assert set(os.listdir(inner)) <= {"in.tar", "out"}
    Artifact.open(inner / "out")


def _response_target(artifact: Artifact, folder: Path) -> Target:
    manifest = artifact.manifest
    feeds = {f"reference/{i}": feed.inputs for i, feed in enumerate(manifest.reference)}
    into = folder / "into"
    outputs = {}
    with PackWriter(into / "outputs.bin", "outputs.bin") as writer:
        for name, inputs in feeds.items():
            outputs[name] = {"output": writer.add(expected(read(artifact.folder, inputs["x"]))).model_dump(mode="json")}
    run = {"status": "ok", "failure": None, "flags": [], "load_s": 0.1, "first_call_s": 0.2,
           "rounds_s": [[0.01, 0.02], [0.01, 0.03]], "peak_rss_bytes": 5_000_000, "outputs": outputs}  # fmt: skip
    noise = {"busy_rounds": 1, "others": 0.2, "steal": 0.0}
    answer = {"protocol": 1, "environment": {"machine": "aarch64"}, "failure": None,
              "candidates": {"onnxruntime-fp32": run}, "noise": noise}  # fmt: skip
    asked = measured.Questions(artifact.folder, manifest.reference, (), None)

    def judge(data: bytes) -> None:
        found = runner.read_answer(data, "fuzzed")
        if found.failure is not None:
            return
        check_response(found.candidates, found.noise, manifest.candidates, "fuzzed")
        response = runner.Response(found.environment, found.candidates, into, found.noise)
        with np.errstate(all="ignore"):
            measured.candidate_result(manifest.candidates[0], response, asked)

    return Target((json.dumps(answer).encode(),), judge)


def _status_lines(manifest: bytes) -> bytes:
    digest = hashlib.sha256(manifest).hexdigest()
    head = f"root /r\nused 10\ninodes 5 10\nname tiny\nlink tiny current releases/{digest}\nlock tiny free x\n"
    release = f"release tiny 5 12 {digest}\nmanifest tiny {len(manifest)} {digest}\n".encode()
    entry = journal.line("tiny", "push", digest, "done").encode() + b"\n"
    tail = f"engine abc ready 10 -\npart 5 6 blobs/x.part\njournal {len(entry)}\n".encode() + entry
    return head.encode() + release + manifest + tail + b"df /dev/sda1 100 50 50 50% /\n"


def _status(data: bytes) -> None:
    """Also with a digest that fits whatever the manifest has become: a device says of itself what it likes."""
    found = re.search(rb"manifest tiny (\d{1,9}) ([0-9a-f]{64})\n", data)
    if found:
        text = data[found.end() : found.end() + int(found[1])]
        data = data.replace(found[2], hashlib.sha256(text).hexdigest().encode())
    status.parse(data, host="fuzzed", where="fuzzed:/r").as_dict()


def _known_hosts() -> tuple[bytes, ...]:
    plain = b"*.lan,!bad.lan,[device]:2222 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJY a comment\n"
    hashed = b"|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ssh-rsa AAAA\n@revoked * ssh-rsa AAAA\n"
    return plain, hashed


def _known(folder: Path, data: bytes) -> None:
    (folder / "known_hosts").write_bytes(data)
    found = known_hosts.known_keys([folder / "known_hosts"], "device.lan")
    known_hosts.check(HostKey("ssh-rsa", b"x"), found, where="device.lan:22", name="device.lan")


def attack(target: Target, seed: int, rounds: int) -> str | None:
    """The first input of `rounds` that ends in anything but a value or an EdgeoptError, in words; None where none."""
    rng = random.Random(seed)
    for number in range(rounds):
        data = damaged(rng.choice(target.valid), rng)
        try:
            target.read(data)
        except EdgeoptError as why:
            if not why.what:
                return f"round {number}: an error without words, of {data[:300]!r}"
        except BaseException:
            if isinstance(sys.exc_info()[1], KeyboardInterrupt):
                raise
            return f"round {number} of seed {seed}: {traceback.format_exc()}\nof {data[:2000]!r}"
    return None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("targets", nargs="*")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        every = targets(Path(folder))
        chosen = given.targets or list(every)
        deadline, seed, failed = time.monotonic() + given.seconds, given.seed, 0
        while time.monotonic() < deadline:
            for name in chosen:
                wrong = attack(every[name], seed, 200)
                if wrong:
                    failed += 1
                    print(f"{name}: {wrong}", file=sys.stderr)
            seed += 1
        print(f"seeds {given.seed} to {seed - 1}, {200 * (seed - given.seed)} inputs a target, {failed} found wanting")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
