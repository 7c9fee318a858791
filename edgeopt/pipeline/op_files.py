"""The libraries of the user's operators on their way: checked before the build, and put beside the model files."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable
from pathlib import Path

from edgeopt.errors import ProjectError
from edgeopt.pipeline.job import Job
from edgeopt.ports import op_library
from edgeopt.ports.op_library import OpLibrary
from edgeopt.program import custom_ops
from edgeopt.program.custom_ops import CustomOps
from edgeopt.spec.manifest import Candidate, EngineRecipe


def check(job: Job) -> None:
    """Refuse, before any work, libraries that this machine or no backend of the target can load. ProjectError.

    A backend that lacks a library for the target is refused on its own when it lowers, where others are left. What
    is read here is the files' headers; nothing is run.
    """
    if not job.project.op_libraries and not job.project.custom_ops:
        return
    custom = custom_ops.of(job.project)
    here, there = platform.machine(), job.profile.target.arch
    if reason := custom.missing_in_torch(here):
        raise ProjectError(
            reason, where=f"key 'op_libraries'; {here} is the machine that builds",
            todo=f"build the library for {here} as well and add it: the model runs here before it runs there",
        )  # fmt: skip
    reasons = {
        "torchscript": custom.missing_in_torch(there),
        "onnxruntime": op_library.missing_for(_all(custom.onnxruntime.values()), there),
        "openvino": "OpenVINO has no such operators, and no extension of it is built here",
        "aoti": "a package of AOTInductor cannot carry operators that are not torch's own",
        "tensorrt": op_library.missing_for(_all(custom.tensorrt.values()), there),
    }
    found = {backend: reasons[backend] for backend in job.profile.backends}
    if all(found.values()):
        lines = "\n".join(f"  - {backend}: {reason}" for backend, reason in found.items())
        raise ProjectError(
            f"no backend of the profile '{job.profile.name}' can load the operator libraries on {there}:\n{lines}",
            where=f"keys 'op_libraries' and 'custom_ops'; {job.project.source}",
            todo=f"build the libraries for {there} and add them beside those that are there",
        )  # fmt: skip


def _all(groups: Iterable[Iterable[OpLibrary]]) -> list[OpLibrary]:
    return [library for group in groups for library in group]


def put_for_here(custom: CustomOps, folder: Path) -> tuple[str, ...]:
    """Put what this machine loads into `folder`; the files' names, in the order of loading."""
    arch = platform.machine()
    return _put((*custom.for_torch(arch), *custom.for_onnxruntime(arch)), folder)


def put_for_target(
    custom: CustomOps, arch: str, folder: Path, candidates: Iterable[Candidate], recipes: Iterable[EngineRecipe]
) -> tuple[tuple[str, ...], set[str]]:
    """Put what the candidates need on a machine of `arch` into `folder`.

    Returns the names of what the runner loads, in order, and of every file, plugins included.
    """
    candidates = tuple(candidates)
    libraries: tuple[OpLibrary, ...] = ()
    if any(c.runtime == "torchscript" for c in candidates):
        libraries = custom.for_torch(arch)
    nodes = _nodes(custom, folder, [c.file for c in candidates if c.runtime == "onnxruntime"])
    if nodes:
        libraries = (*libraries, *custom.for_onnxruntime(arch, nodes))
    names = _put(libraries, folder)
    wanted = {file for recipe in recipes for file in recipe.plugins}
    plugins = _put((o for o in custom.for_tensorrt(arch) if o.artifact_path in wanted), folder)
    return names, {*names, *plugins}


def _nodes(custom: CustomOps, folder: Path, files: list[str]) -> set[str]:
    """The foreign nodes of the files, which are read only where the project has libraries for some."""
    if not custom.onnxruntime and all(o.kind != "onnxruntime" for o in custom.libraries):
        return set()
    from edgeopt.backends.custom_ops import nodes_in

    return {node for file in set(files) for node in nodes_in(folder / file)}


def _put(libraries: Iterable[OpLibrary], folder: Path) -> tuple[str, ...]:
    names = []
    for library in libraries:
        if not (folder / library.artifact_path).exists():
            (folder / library.artifact_path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library.path, folder / library.artifact_path)  # no link: a compiler writes in place
        names.append(library.artifact_path)
    return tuple(names)
