"""A project in a folder from the text of its model, as a user writes it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import torch

from edgeopt.capture import capture
from edgeopt.ports.user_code import load_attribute
from edgeopt.program import Program, graph
from edgeopt.progress import SILENT
from edgeopt.runtime import structure
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


def eager(folder: Path, inputs: dict[str, np.ndarray], name: str = "Model") -> list[np.ndarray]:
    """What the user's own model in `folder` gives for flat inputs by name: its tensors in depth-first order."""
    module = load_attribute(f"model.py:{name}", folder, key="model")().eval()
    with torch.no_grad():
        returned = module(**{key: torch.from_numpy(np.array(value)) for key, value in inputs.items()})
    found = structure.flatten(returned, lambda value: isinstance(value, torch.Tensor))
    return [tensor.detach().resolve_neg().numpy() for tensor in found.tensors]


def assert_as_eager(program: Program, folder: Path, *calls: dict[str, np.ndarray]) -> None:
    """The program gives for each of the calls what the user's model does: shapes, dtypes, values."""
    for inputs in calls:
        got = list(run(program, **inputs).values())
        assert_same(got, eager(folder, inputs))


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
