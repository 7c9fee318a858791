"""What a stage's result depends on, as a digest, found without importing torch or the user's code.

What counts: edgeopt's own sources and the versions of the libraries that write graphs, every Python file of the
project's folder and of the packages that it names, the weights and the model file by content, declared `data` by
content, and the canonical project and profile. A stage's key holds the key of the stage before it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import edgeopt
from edgeopt import digest
from edgeopt.backends import compiled_for
from edgeopt.pipeline.job import Job
from edgeopt.ports import user_code

_TOOLS = ("torch", "torchao", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "openvino", "numpy")
_NOT_SOURCES = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_NOT_IN = ("pyvenv.cfg", "onboard.pyz")  # of environments and of artifacts, which hold the project's op libraries

# stage -> the keys of the project and of the profile that it reads
_PROJECT_KEYS = {
    "capture": (
        "model",
        "weights",
        "inputs",
        "axes",
        "calibration",
        "seed",
        "data_version",
        "op_libraries",
        "custom_ops",
    ),
    "optimize": ("passes", "rules"),
    "qat": ("train", "loss", "evaluate", "outputs", "qat", "keep_float", "keep_fp32"),
    "quantize": ("calibration_batches",),
    "reoptimize": ("passes",),
    "fp16": ("calibration_batches", "keep_fp32"),
    "bf16": ("calibration_batches", "keep_fp32"),
}
_PROFILE_KEYS = {
    "capture": (),
    "optimize": ("passes", "fusion", "precision", "target"),
    "qat": ("quantization", "precision", "target"),
    "quantize": ("quantization", "precision", "backends"),
    "reoptimize": ("passes", "fusion", "backends", "target"),
    "fp16": ("precision",),
    "bf16": ("precision",),
}
_BRANCHES = {"fp16": "optimize", "bf16": "optimize"}  # stages whose result no later one takes -> the one before them


def tool_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that write graphs, read from their metadata."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "edgeopt": edgeopt.__version__}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def stage_keys(job: Job) -> dict[str, str]:
    """Stage name -> digest of everything that its result depends on, and 'build' for the whole artifact."""
    project = job.project.model_dump(mode="json")
    profile = job.profile.model_dump(mode="json")
    before = digest.of_value(
        {
            "tools": tool_versions(),
            "machine": platform.machine(),
            "edgeopt": _digest_tree(Path(edgeopt.__file__).parent),
            "sources": _project_sources(job),
            "files": _project_files(job),
        }
    )
    keys = {}
    for stage in _PROJECT_KEYS:
        earlier = keys[_BRANCHES[stage]] if stage in _BRANCHES else before
        keys[stage] = digest.of_value({"stage": stage, "before": earlier, **read_by(stage, job)})
        before = before if stage in _BRANCHES else keys[stage]
    keys["build"] = digest.of_value(
        {
            "before": before,
            "project": project,
            "profile": profile,
            "target_python": job.target_python,
            "device": (job.device.label, job.device.facts) if job.device else None,
            "compiled_for": compiled_for.of_stage_key(job.profile),
        }
    )
    return keys


def read_by(stage: str, job: Job) -> dict[str, Any]:
    """What a stage itself reads of project and profile; what it is given has a key of its own."""
    project, profile = job.project.model_dump(mode="json"), job.profile.model_dump(mode="json")
    return {
        "project": {k: project.get(k) for k in _PROJECT_KEYS[stage]},
        "profile": {k: profile.get(k) for k in _PROFILE_KEYS[stage]},
    }


def _project_sources(job: Job) -> dict[str, str]:
    """Digest of the project's own Python files, and of each package that the project names."""
    user_code.take_turn(job.project.folder)  # a package is looked for where this project would import it from
    found = {".": _digest_tree(job.project.folder)}
    named = [getattr(job.project, key, None) for key in ("model", "calibration", "train", "loss", "evaluate")]
    named += [job.project.qat.trainer, job.project.qat.optimizer]
    for name in (*named, *job.project.rules):
        where = (name or "").rpartition(":")[0]
        if where and not where.endswith(".py"):
            package = where.split(".")[0]
            spec = importlib.util.find_spec(package)  # of a top-level name: imports nothing
            if spec is not None and spec.origin and Path(spec.origin).is_file():
                origin = Path(spec.origin)
                found[package] = (
                    _digest_tree(origin.parent) if spec.submodule_search_locations else digest.of_file(origin)
                )
    return found


def _project_files(job: Job) -> dict[str, str]:
    """Digest of the weights, of a model file, and of every declared data file."""
    project = job.project
    named = [project.weights, project.qat.state, *project.data, *project.op_libraries]
    named += [file for op in project.custom_ops.values() for file in (*op.onnxruntime, *op.tensorrt)]
    if ":" not in project.model:
        named.append(project.model)
    out = {}
    for name in filter(None, named):
        path = project.path(name)
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            out[f"{name}: {file.relative_to(path.parent)}"] = digest.of_file(file)
    return out


def _digest_tree(folder: Path) -> str:
    return digest.of_value({str(p.relative_to(folder)): digest.of_file(p) for p in _python_files(folder)})


def _python_files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            d for d in folders
            if d not in _NOT_SOURCES and not d.startswith(".")
            and not any((Path(root) / d / file).exists() for file in _NOT_IN)
        )  # fmt: skip
        yield from (Path(root) / f for f in sorted(files) if f.endswith(".py"))
