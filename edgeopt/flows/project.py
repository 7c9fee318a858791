"""The project that a command is about: the project file, a MODEL argument, or both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from edgeopt.errors import ProjectError
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.manifest import BUILD_NAME
from edgeopt.spec.project import FILE_NAME, Project, load_project, project_for_model


def find_project(model: str | None, path: Path, overrides: Mapping[str, str]) -> Project:
    """The project file at `path`, its model replaced by MODEL where one is given; without a file, MODEL alone.

    A MODEL alone must tell its own inputs, as an ONNX file does; else ProjectError says to run `edgeopt init`.
    """
    if model is None:
        return load_project(path, overrides)
    if path.is_file() or (path / FILE_NAME).is_file():
        return load_project(path, {**overrides, "model": model})
    if path.is_dir():
        return project_for_model(model, folder=path, overrides=overrides, **_inputs_of(model, path))
    raise ProjectError("there is no such project file", where=str(path), todo="check the path, or leave --project out")


def _inputs_of(model: str, folder: Path) -> dict:
    """Inputs and axes that an ONNX file declares, as data; nothing for other models."""
    if not model.endswith(".onnx") or not (folder / model).is_file():
        return {}
    from edgeopt.flows.init import infer

    found = infer(model, folder)
    return {"inputs": found.inputs, "axes": found.axes}


def project_file_of(artifact: Artifact) -> str | None:
    """The project file that the artifact's `build.json` names, None where it is not on this machine."""
    try:
        named = json.loads((artifact.folder / BUILD_NAME).read_bytes()).get("project")
    except (OSError, ValueError, AttributeError):
        return None
    return named if named and Path(named).is_file() else None
