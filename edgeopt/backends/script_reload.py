"""A TorchScript file loaded and run by the runner, in an interpreter of its own: an abort there is an answer here."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from edgeopt.backends import equality
from edgeopt.errors import LoweringError
from edgeopt.program import ExportedGraph, ScriptGraph, graph
from edgeopt.runtime import tensors, zipapp
from edgeopt.spec.manifest import TensorRef, TensorSpec

TIMEOUT_S = 600  # an emulated torch takes a minute to import


def check(program: ExportedGraph | ScriptGraph, path: Path, *, python: str) -> None:
    """LoweringError where `python`'s torch does not load the file or gives other outputs than the program."""
    cases = list(equality.cases(program))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(path, folder / path.name)
        answer = _run(folder, path.name, program, cases, python)
        for i, case in enumerate(cases):
            refs = answer["outputs"][str(i)]
            found = {k: tensors.read(folder, TensorRef(**refs[k])) for k in program.signature.output_names}
            expected = _expected(program, case.inputs)
            equality.require(expected, found, words=case.words, file=path.name, integer=False)


def _run(folder: Path, file: str, program: ExportedGraph | ScriptGraph, cases: list, python: str) -> dict:
    """The runner's result for the file: {"status", "failure", "outputs"}; LoweringError where it failed."""
    request = {
        "protocol": 1,
        "folder": str(folder),
        "out": str(folder),
        "candidates": [{"name": "file", "runtime": "torchscript", "precision": "fp32", "file": file, "flags": {}}],
        "inputs": _json(program.signature.inputs),
        "outputs": _json(program.signature.outputs),
        "op_libraries": [],
        "feeds": _feeds(folder / "feeds.bin", cases),
        "measure": None,
        "threads": None,
        "timeout_s": TIMEOUT_S,
    }
    (folder / "request.json").write_text(json.dumps(request))
    argv = [python, str(zipapp.write_zipapp(folder)), "run", str(folder / "request.json"), str(folder / "response.json")]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=2 * TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as why:
        raise LoweringError(f"the file could not be test-loaded with {python}: {why}", where=file) from why
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise LoweringError(f"the file could not be test-loaded with {python}: {said}", where=file)
    response = json.loads((folder / "response.json").read_text())
    answer = response["candidates"].get("file", {"failure": response["failure"]})
    if answer["failure"]:
        torch_there = response["environment"].get("runtimes", {}).get("torch")
        raise LoweringError(f"torch {torch_there} cannot run the file: {answer['failure']['message']}", where=file)
    return answer


def _feeds(path: Path, cases: list[equality.Case]) -> list[dict]:
    feeds = []
    with tensors.PackWriter(path, path.name) as pack:
        for i, case in enumerate(cases):
            refs = {name: pack.add(array).model_dump(mode="json") for name, array in case.inputs.items()}
            feeds.append({"id": str(i), "inputs": refs})
    return feeds


def _expected(program: ExportedGraph | ScriptGraph, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return graph.run(program, inputs)


def _json(specs: tuple[TensorSpec, ...]) -> list[dict]:
    return [spec.model_dump(mode="json") for spec in specs]
