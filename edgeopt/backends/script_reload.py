"""A file of torch's loaded and run by the runner, in an interpreter of its own: an abort there is an answer here."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeopt.backends import equality
from edgeopt.errors import LoweringError
from edgeopt.ports.op_library import OpLibrary
from edgeopt.program import ExportedGraph, ScriptGraph
from edgeopt.runtime import tensors, zipapp
from edgeopt.spec.manifest import TensorRef, TensorSpec

TIMEOUT_S = 600  # an emulated torch takes a minute to import


def check(
    program: ExportedGraph | ScriptGraph, path: Path, *, python: str, libraries: Sequence[OpLibrary] = (),
    runtime: str = "torchscript", flags: Mapping[str, Any] | None = None, calls: int = 1,
) -> str:  # fmt: skip
    """The version of `python`'s torch, which loaded the file and gave the program's outputs; else LoweringError.

    `libraries`: of the user's operators, loaded before it. `runtime` and `flags`: as of the candidate that names it.
    `calls`: of each case, one after the other, for executors that change the graph once they have seen sizes.
    """
    cases = [case for case in equality.cases(program) for _ in range(calls)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(path, folder / path.name)
        for library in libraries:
            (folder / library.artifact_path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library.path, folder / library.artifact_path)
        files = [library.artifact_path for library in libraries]
        candidate = {
            "name": "file", "runtime": runtime, "precision": "fp32", "file": path.name, "flags": dict(flags or {}),
        }  # fmt: skip
        version, answer = _run(folder, candidate, program, cases, python, files)
        within = equality.tolerance(program)
        for i, case in enumerate(cases):
            refs = answer["outputs"][str(i)]
            found = {k: tensors.read(folder, TensorRef(**refs[k])) for k in program.signature.output_names}
            wanted = equality.expected(program, case.inputs)
            equality.require(wanted, found, within, words=case.words, file=path.name)
    return version


def _run(
    folder: Path, candidate: dict[str, Any], program: ExportedGraph | ScriptGraph, cases: list[equality.Case],
    python: str, libraries: list[str],
) -> tuple[str, dict]:  # fmt: skip
    """torch's version there, and the runner's result for the file as onboard/run.py describes it."""
    file = candidate["file"]
    asked, answered = folder / "request.json", folder / "response.json"
    asked.write_text(json.dumps(_request(folder, candidate, program, cases) | {"op_libraries": libraries}))
    argv = [python, str(zipapp.write_zipapp(folder)), "run", str(asked), str(answered)]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=2 * TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as why:
        raise LoweringError(f"the file could not be test-loaded with {python}: {why}", where=file) from why
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:] or f"it ended with status {done.returncode}"
        raise LoweringError(f"the file could not be test-loaded with {python}: {said}", where=file)
    response = json.loads(answered.read_text())
    version = str(response["environment"]["runtimes"].get("torch"))
    answer = response["candidates"].get("file", {"failure": response["failure"]})
    if answer["failure"]:
        raise LoweringError(f"torch {version} cannot run the file: {answer['failure']['message']}", where=file)
    return version, answer


def _request(
    folder: Path, candidate: dict[str, Any], program: ExportedGraph | ScriptGraph, cases: list[equality.Case]
) -> dict:
    """The runner's request, as onboard/run.py describes it."""
    return {
        "protocol": 1,
        "folder": str(folder),
        "out": str(folder),
        "candidates": [candidate],
        "inputs": _json(program.signature.inputs),
        "outputs": _json(program.signature.outputs),
        "op_libraries": [],
        "feeds": _feeds(folder / "feeds.bin", cases),
        "measure": None,
        "threads": None,
        "timeout_s": TIMEOUT_S,
    }


def _feeds(path: Path, cases: list[equality.Case]) -> list[dict]:
    feeds = []
    with tensors.PackWriter(path, path.name) as pack:
        for i, case in enumerate(cases):
            refs = {name: pack.add(array).model_dump(mode="json") for name, array in case.inputs.items()}
            feeds.append({"id": str(i), "inputs": refs})
    return feeds


def _json(specs: tuple[TensorSpec, ...]) -> list[dict]:
    return [spec.model_dump(mode="json") for spec in specs]
