"""A stage's key changes with what the stage reads, and with nothing else."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from edgeopt.device.session import Device
from edgeopt.pipeline.job import Job
from edgeopt.pipeline.keys import stage_keys
from edgeopt.ports.local import LocalConnection
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import load_project
from tests.small_project import write_project

STAGES = ["capture", "optimize", "qat", "quantize", "reoptimize", "build"]


def keys(folder: Path, profile: str = "x86-cpu", project: dict | None = None, on_profile: dict | None = None) -> dict:
    job = Job(load_profile(profile, on_profile or {}), load_project(folder, project or {}), folder / ".edgeopt")
    return stage_keys(job)


def first_changed(a: dict, b: dict) -> str | None:
    """The first stage whose key differs; every later one must differ too."""
    changed = [stage for stage in STAGES if a[stage] != b[stage]]
    assert changed == STAGES[len(STAGES) - len(changed) :]
    return changed[0] if changed else None


def test_what_is_measured_on_another_device_is_another_build_and_the_stages_stay(folder):
    job = Job(load_profile("x86-cpu"), load_project(folder), folder / ".edgeopt")
    devices = None, Device(LocalConnection(), "python3", {"cpu_count": 2}), Device(LocalConnection(), "python3", {})
    here, there, other = (stage_keys(dataclasses.replace(job, device=device)) for device in devices)
    assert first_changed(here, there) == first_changed(there, other) == "build"


@pytest.fixture
def folder(tmp_path):
    write_project(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"one")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"a")
    text = (tmp_path / "edgeopt.yaml").read_text()
    (tmp_path / "edgeopt.yaml").write_text(text[:-1] + ', "weights": "weights.pt", "data": ["images"]}')
    return tmp_path


def test_the_same_project_has_the_same_keys(folder):
    assert first_changed(keys(folder), keys(folder)) is None


@pytest.mark.parametrize(
    ("project", "profile", "stage"),
    [
        ({"seed": "1"}, {}, "capture"),
        ({"axes.n.max": "9"}, {}, "capture"),
        ({"inputs.image.camera": "{mean: 127}"}, {}, "capture"),
        ({"outputs": "{scores: {head: argmax}}"}, {}, "qat"),  # evaluate sees it, which may choose the best epoch
        ({"passes": "{cse: off}"}, {}, "optimize"),
        ({}, {"precision.allowed": "[fp32]"}, "optimize"),
        ({"qat.epochs": "2"}, {}, "qat"),
        ({"qat.control": "true"}, {}, "qat"),
        ({"evaluate": "data.py:other"}, {}, "qat"),  # it may choose the best epoch
        ({"keep_float": "[head]"}, {}, "qat"),
        ({}, {"quantization.per_channel": "false"}, "qat"),
        ({"calibration_batches": "3"}, {}, "quantize"),
        ({"limits.latency_ms": "9"}, {}, "build"),
        ({}, {"measure.mode": "throughput"}, "build"),
        ({"name": "other"}, {}, "build"),
        ({}, {"root": "/data"}, "build"),
        ({}, {"fuser.texpr_fuser": "true"}, "build"),
    ],
)
def test_a_setting_changes_the_stage_that_reads_it_and_those_after(folder, project, profile, stage):
    assert first_changed(keys(folder), keys(folder, project=project, on_profile=profile)) == stage


@pytest.mark.parametrize("file", ["data.py", "sub/helper.py", "weights.pt", "images/a.png", "images/b.png"])
def test_content_counts(folder, file):
    before = keys(folder)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("# other\n")
    assert first_changed(before, keys(folder)) == "capture"


@pytest.mark.parametrize("file", ["notes.txt", ".edgeopt/cache/x.py", ".venv/lib/y.py", "__pycache__/z.py"])
def test_what_is_no_source_does_not_count(folder, file):
    before = keys(folder)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("x = 1\n")
    assert first_changed(before, keys(folder)) is None


def test_data_counts_by_its_content_or_by_data_version(folder):
    versioned = {"data": "[]", "data_version": "'1'"}
    before = keys(folder, project=versioned)
    (folder / "images" / "a.png").write_bytes(b"other")
    assert first_changed(before, keys(folder, project=versioned)) is None
    assert first_changed(before, keys(folder, project={**versioned, "data_version": "'2'"})) == "capture"


def test_a_package_that_the_project_names_counts_and_is_not_imported(folder, tmp_path, monkeypatch):
    package = tmp_path / "elsewhere" / "shapes_of_bars"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "make.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(package.parent))
    named = {"evaluate": "shapes_of_bars.make:evaluate"}
    before = keys(folder, project=named)
    (package / "make.py").write_text("x = 2\n")
    assert first_changed(before, keys(folder, project=named)) == "capture"


def test_a_module_named_without_py_counts_the_same_before_and_after_it_was_imported(folder, tmp_path_factory):
    from edgeopt.ports.user_code import load_attribute

    other = write_project(tmp_path_factory.mktemp("other"))
    named = {"evaluate": "data:evaluate"}
    before = keys(folder, project=named)
    for project in (folder, other):
        load_attribute("data:evaluate", project, key="evaluate")
        assert first_changed(before, keys(folder, project=named)) is None


def test_the_keys_are_found_without_torch(folder):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from tests.pipeline.test_keys import keys\n"
        "keys(Path(sys.argv[1])); assert not {'torch', 'onnx', 'onnxruntime', 'model'} & set(sys.modules)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, str(folder), root], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_compiler_counts_where_something_is_compiled_and_nowhere_else(folder, tmp_path, monkeypatch):
    compiled = {"backends": "[onnxruntime, aoti]"}
    before, plain = keys(folder, on_profile=compiled), keys(folder)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))  # a machine without one
    assert first_changed(before, keys(folder, on_profile=compiled)) == "build"
    assert first_changed(plain, keys(folder)) is None
