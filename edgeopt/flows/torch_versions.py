"""The torch that wrote an artifact's TorchScript files against the device's, before anything is pushed.

An older torch does not know the operators, nor the file format, of a newer one, and says so in words that nobody reads,
or ends the process (case V04).
"""

from __future__ import annotations

import inspect
import json
import zipfile
from dataclasses import dataclass

from edgeopt.errors import DeviceError
from edgeopt.onboard import environment
from edgeopt.ports.connection import Connection
from edgeopt.progress import log
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.manifest import Candidate

TORCH_RECORD = "extra/torch_version"  # as backends/script_file writes it
_RUNTIME_MODULES = {"torchscript": "torch", "onnxruntime": "onnxruntime", "tensorrt": "tensorrt"}


@dataclass(frozen=True)
class Written:
    """What a TorchScript file says of itself: the torch that wrote it, None in older artifacts, and its format."""

    torch: str | None
    file_format: str

    def __str__(self) -> str:
        return f"torch {self.torch} (file format {self.file_format})"


def check(artifact: Artifact, connection: Connection, python: str = "python3") -> None:
    """Compare the versions, in one round trip, where the artifact has TorchScript at all.

    DeviceError, which names both torch versions, where the device's torch is older than the file and was never tried
    with it, and the device has the runtime of no other candidate; a warning where it has. Nothing is said of a device
    without Python or torch: validating does.
    """
    scripts = [c for c in artifact.manifest.candidates if c.runtime == "torchscript"]
    if not scripts:
        return
    there = _runtimes(connection, python)
    too_new = {c.name: said for c in scripts if (said := _too_new(artifact, c, there.get("torch")))}
    if not too_new:
        return
    others = [c for c in artifact.manifest.candidates if c.name not in too_new and there.get(_module(c))]
    if others:
        for name, said in too_new.items():
            log.warning("%s will not run on %s: %s", name, connection.label, said)
        return
    raise DeviceError(
        "; ".join(dict.fromkeys(too_new.values())), where=f"{connection.label}, {python}",
        todo="build with --target-python naming an interpreter that has the device's torch, or update torch there",
    )  # fmt: skip


def written_by(artifact: Artifact, candidate: Candidate) -> Written:
    """What the candidate's file says of itself."""
    with zipfile.ZipFile(artifact.path(candidate.file)) as file:
        top = file.namelist()[0].partition("/")[0]
        records = {name.partition("/")[2] for name in file.namelist()}
        torch = file.read(f"{top}/{TORCH_RECORD}").decode() if TORCH_RECORD in records else None
        version = ".data/version" if ".data/version" in records else "version"  # the first from format 6 on
        return Written(torch, file.read(f"{top}/{version}").decode().strip())


def _too_new(artifact: Artifact, candidate: Candidate, there: str | None) -> str | None:
    """Why the device's torch cannot be trusted with the file; None where it can, or where nothing is known."""
    if there in (None, "unknown"):
        return None
    written = written_by(artifact, candidate)
    if written.torch is None or _release(there) >= _release(written.torch) or _tried(artifact, there):
        return None
    return f"the artifact's {candidate.file} was written by {written}, and the device has torch {there}, which is older"


def _tried(artifact: Artifact, there: str) -> bool:
    """Whether the file was loaded by a torch of the target's range, in which the device's lies, when it was built."""
    target = artifact.manifest.target.get("torch") or {}
    low, high = target.get("min"), target.get("max")
    return bool(low or high) and (not low or _release(low) <= _release(there)) and (
        not high or _release(there) <= _release(high)
    )  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers: TorchScript's operators change with those."""
    return version_tuple(version)[:2]


def _module(candidate: Candidate) -> str:
    return _RUNTIME_MODULES.get(candidate.runtime, candidate.runtime)


def _runtimes(connection: Connection, python: str) -> dict[str, str | None]:
    """{runtime: version there}, by the runner's own code sent as stdin; {} where there is no such Python."""
    source = inspect.getsource(environment) + "\nimport json\nprint(json.dumps(describe()['runtimes']))\n"
    try:
        done = connection.run([python, "-"], stdin=source.encode(), timeout_s=60, check=False)
        return json.loads(done.text.splitlines()[-1]) if done.status == 0 else {}
    except (DeviceError, ValueError, IndexError, RecursionError):  # no such interpreter; one that prints something else
        return {}
