"""Asks the packed runner, in a process of its own, about an artifact: as a host does, without a Connection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from edgeopt.runtime.artifact import Artifact

MEASURE = {"feed": "reference/0", "rounds": 3, "calls": 20, "warmup": 2, "max_s": 10}


def request_of(artifact: Artifact, out: Path, **changes) -> dict:
    """A request for every candidate of `artifact` and its reference feeds; `changes` replace keys."""
    manifest = artifact.manifest.model_dump(mode="json")
    feeds = [{"id": f"reference/{i}", "inputs": f["inputs"]} for i, f in enumerate(manifest["reference"])]
    request = {
        "protocol": 1, "folder": str(artifact.folder), "out": str(out),
        "candidates": manifest["candidates"], "inputs": manifest["inputs"], "outputs": manifest["outputs"],
        "op_libraries": manifest["op_libraries"], "feeds": feeds, "measure": None, "threads": 1, "timeout_s": 60,
    }  # fmt: skip
    return {**request, **changes}


def ask(artifact: Artifact, request: dict, work: Path, *, python: str = sys.executable) -> dict:
    """Run onboard.pyz on `request` and return its response; the runner must say that it wrote one.

    A measurement takes a lock of its own below `work`, and not the machine's, which other tests may hold.
    """
    if request.get("measure"):
        request = {**request, "measure": {"lock": str(work / "lock"), **request["measure"]}}
    (work / "request.json").write_text(json.dumps(request))
    Path(request["out"]).mkdir(exist_ok=True)
    argv = [python, str(artifact.folder / "onboard.pyz"), "run", str(work / "request.json"), str(work / "r.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads((work / "r.json").read_text())
