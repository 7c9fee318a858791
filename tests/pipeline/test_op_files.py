"""Operator libraries on their way into an artifact: only what the target and its candidates need."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
from pathlib import Path
from typing import get_args

import pytest

from edgeopt.errors import ProjectError
from edgeopt.pipeline import op_files
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.program import custom_ops
from edgeopt.spec.manifest import EngineRecipe
from edgeopt.spec.profile import load_profile
from edgeopt.spec.profile_values import BackendName
from edgeopt.spec.project import load_project
from tests.native import ort_library
from tests.tiny import candidate, onnx_model

HERE = platform.machine()
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[HERE]
PROFILES = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}


def job(folder: Path, arch: str = HERE, **keys) -> Job:
    """A project with a Python library, and of acme::Scale a library of onnxruntime's and one of a plugin for each."""
    (folder / "ops").mkdir(parents=True, exist_ok=True)
    (folder / "ops.py").write_text("import torch\n")
    for machine in (HERE, OTHER):
        (folder / machine).mkdir(exist_ok=True)
        shutil.copy(ort_library(machine), folder / machine / "libort.so")
        shutil.copy(ort_library(machine), folder / machine / "libplugin.so")
    node = {
        "onnxruntime": [f"{m}/libort.so" for m in (HERE, OTHER)],
        "tensorrt": [f"{m}/libplugin.so" for m in (HERE, OTHER)],
    }
    values = {
        "name": "m", "model": "model.py:build", "inputs": {"x": {"shape": [1]}}, "op_libraries": ["ops.py"],
        "custom_ops": {"acme::Scale": node}, **keys,
    }  # fmt: skip
    (folder / "model.py").touch()
    (folder / "edgeopt.yaml").write_text(json.dumps(values))
    return Job(load_profile(PROFILES[arch]), load_project(folder), folder / ".edgeopt")


def put(folder: Path, arch: str, *candidates, recipes=()) -> tuple[tuple[str, ...], set[str]]:
    out = folder / "out"
    out.mkdir()
    foreign = onnx_model()
    foreign.graph.node[1].domain, foreign.graph.node[1].op_type = "acme", "Scale"
    (out / "foreign.onnx").write_bytes(foreign.SerializeToString())
    (out / "plain.onnx").write_bytes(onnx_model().SerializeToString())
    own = custom_ops.of(job(folder).project)
    found = op_files.put_for_target(own, arch, out, candidates, recipes)
    assert all((out / name).is_file() for name in found[1])
    return found


@pytest.mark.parametrize("arch", [HERE, OTHER])
def test_a_file_with_the_node_needs_the_targets_library(tmp_path, arch):
    names, held = put(tmp_path, arch, candidate("a", "onnxruntime", "foreign.onnx"))
    assert names == (f"ops/{arch}/libort.so",) and held == set(names)
    library = tmp_path / "out" / names[0]
    assert library.read_bytes() == (tmp_path / arch / "libort.so").read_bytes()
    assert library.stat().st_nlink == 1  # the compiler writes the user's file in place


def test_a_file_without_the_node_needs_none(tmp_path):
    assert put(tmp_path, HERE, candidate("a", "onnxruntime", "plain.onnx")) == ((), set())


def test_torchscript_needs_torchs_and_no_other(tmp_path):
    assert put(tmp_path, HERE, candidate("a", "torchscript", "float.pt")) == (("ops/ops.py",), {"ops/ops.py"})


def test_a_recipe_needs_its_plugins_which_the_runner_does_not_load(tmp_path):
    recipe = EngineRecipe(candidate="a", shapes={}, typing="weak", plugins=(f"ops/{OTHER}/libplugin.so",))
    names, held = put(tmp_path, OTHER, candidate("a", "tensorrt", "plain.onnx"), recipes=(recipe,))
    assert names == () and held == {f"ops/{OTHER}/libplugin.so"}


def test_libraries_of_one_name_in_two_folders_both_count_for_the_cache(tmp_path):
    before = stage_keys(job(tmp_path))["capture"]
    for machine in (HERE, OTHER):
        with (tmp_path / machine / "libort.so").open("ab") as f:
            f.write(b"\0")
        after = stage_keys(Job(load_profile("x86-cpu"), load_project(tmp_path), tmp_path / ".edgeopt"))["capture"]
        assert after != before
        before = after


def test_an_artifact_in_the_projects_folder_is_none_of_its_sources(tmp_path):
    """It holds a copy of the Python library, which would make every second build a new one."""
    before = stage_keys(job(tmp_path))["build"]
    (tmp_path / "m.edgeopt" / "ops").mkdir(parents=True)
    (tmp_path / "m.edgeopt" / "onboard.pyz").touch()
    (tmp_path / "m.edgeopt" / "ops" / "ops.py").write_text("import torch\n")
    assert stage_keys(job(tmp_path))["build"] == before


def test_a_project_that_every_backend_can_serve_is_let_through(tmp_path):
    op_files.check(job(tmp_path))
    op_files.check(job(tmp_path, OTHER))


@pytest.mark.parametrize("backend", [b for b in get_args(BackendName) if b != "tensorrt"])
def test_each_backend_has_its_answer_before_any_work(backend, tmp_path):
    profile = load_profile(PROFILES[HERE], {"backends": f"[{backend}]", "precision.allowed": "[fp32]"})
    asked = dataclasses.replace(job(tmp_path), profile=profile)
    if backend in ("onnxruntime", "torchscript"):
        op_files.check(asked)
        return
    with pytest.raises(ProjectError, match=f"- {backend}: ") as refused:
        op_files.check(asked)
    assert "no backend of the profile" in refused.value.what


def test_a_library_that_is_none_stops_before_any_work(tmp_path):
    (tmp_path / "libbad.so").write_text("no library")
    with pytest.raises(ProjectError, match="neither"):
        op_files.check(job(tmp_path, op_libraries=["ops.py", "libbad.so"]))
