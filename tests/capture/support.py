"""A project in a folder from the text of its model, as a user writes it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from edgeopt.capture import capture
from edgeopt.program import Program, graph
from edgeopt.progress import SILENT
from edgeopt.spec.project import Project, project_for_model

HEAD = """\
import dataclasses
import torch
import torch.nn.functional as F
from torch import nn
"""


def project(folder: Path, code: str, inputs: dict, axes: dict | None = None, **keys: str) -> Project:
    """The project whose `model.py` is HEAD and `code`, which defines `Model`; `keys` are further project keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(HEAD + textwrap.dedent(code))
    return project_for_model(
        keys.pop("model", "model.py:Model"), folder=folder, inputs=inputs, axes=axes, overrides=keys
    )


def captured(folder: Path, code: str, inputs: dict, axes: dict | None = None, **keys: str) -> Program:
    return capture(project(folder, code, inputs, axes, **keys), progress=SILENT)


def run(program: Program, **inputs) -> dict[str, np.ndarray]:
    return graph.run(program, {name: np.asarray(value) for name, value in inputs.items()})
