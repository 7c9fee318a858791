"""Several projects in one process: each has a model.py, a data.py and a helper, and none sees another's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgeopt.errors import ModelError, ProjectError
from edgeopt.ports.user_code import load_attribute

MODEL = "import helper\nfrom package.inner import NAME as inner\nNAME = '{name}'\ndef build():\n    return NAME\n"
DATA = (
    "import model\ndef names():\n    import late\n    return [model.NAME, model.helper.NAME, model.inner, late.NAME]\n"
)


@pytest.fixture(autouse=True)
def imports_put_back():
    path = list(sys.path)
    yield
    sys.path[:] = path


def project(folder: Path, name: str) -> Path:
    (folder / "package").mkdir(parents=True)
    (folder / "model.py").write_text(MODEL.format(name=name))
    (folder / "data.py").write_text(DATA)
    for file in ("helper.py", "late.py", "package/inner.py"):
        (folder / file).write_text(f"NAME = '{name}'\n")
    (folder / "package/__init__.py").write_text("")
    return folder


def load(folder: Path, spec: str):
    return load_attribute(spec, folder, key="key")


@pytest.mark.parametrize("first", ["data.py:names", "data:names"])
@pytest.mark.parametrize("nested", [False, True])
def test_each_project_finds_its_own_modules(tmp_path, first, nested):
    one = project(tmp_path / "one", "one")
    other = project(one / "sub" if nested else tmp_path / "other", "other")
    assert load(one, first)() == ["one"] * 4
    assert load(other, first)() == ["other"] * 4
    assert load(one, "data.py:names")() == ["one"] * 4
    assert load(other, "model.py:build")() == "other"
    assert load(other, "data:names")() == ["other"] * 4


def test_what_a_project_imported_is_the_same_when_its_turn_comes_again(tmp_path):
    one, other = project(tmp_path / "one", "one"), project(tmp_path / "other", "other")
    build, helper = load(one, "model.py:build"), load(one, "model.py:helper")
    load(other, "data.py:names")
    assert load(one, "model.py:build") is build and load(one, "data.py:model").helper is helper


def test_another_projects_helper_is_not_found(tmp_path):
    one, other = project(tmp_path / "one", "one"), project(tmp_path / "other", "other")
    load(one, "data.py:names")()
    (other / "late.py").unlink()
    (other / "helper.py").unlink()
    with pytest.raises(ProjectError, match="cannot import 'helper'"):
        load(other, "model.py:build")


def test_files_below_the_folder_are_kept_apart_too(tmp_path):
    for name in ("one", "other"):
        project(tmp_path / name / "src", name)
    assert load(tmp_path / "one", "src/package/inner.py:NAME") == "one"
    assert load(tmp_path / "other", "src/package/inner.py:NAME") == "other"
    assert load(tmp_path / "other", "src.package.inner:NAME") == "other"
    assert load(tmp_path / "one", "src.package.inner:NAME") == "one"


def test_modules_of_the_process_and_of_the_library_stay_what_they_are(tmp_path):
    """Also where a project has a file of that name, and where edgeopt itself lies in the project's folder."""
    before = {name: sys.modules[name] for name in ("json", "edgeopt", "edgeopt.errors", "tests", "pytest")}
    one, other = project(tmp_path / "one", "one"), project(tmp_path / "other", "other")
    (one / "json.py").write_text("NAME = 'mine'\n")
    assert load(one, "json.py:NAME") == "mine"
    load(Path(__file__).parents[2], "edgeopt/errors.py:EdgeoptError")
    load(other, "model.py:build")
    assert {name: sys.modules[name] for name in before} == before


def test_a_file_that_fails_leaves_no_module_behind(tmp_path):
    one, other = project(tmp_path / "one", "one"), project(tmp_path / "other", "other")
    load(one, "model.py:build")
    (other / "model.py").write_text("raise RuntimeError('no weights')\n")
    for _ in range(2):
        with pytest.raises(ModelError, match="no weights"):
            load_attribute("model.py:build", other, key="model", error=ModelError)
    assert "model" not in sys.modules


def test_two_projects_may_give_named_tuples_of_one_name(tmp_path):
    """TorchScript knows them by module and name, once a process."""
    import torch

    code = (
        "import torch\nfrom typing import NamedTuple\nclass Out(NamedTuple):\n    {fields}\n"
        "class Net(torch.nn.Module):\n    def forward(self, x: torch.Tensor):\n        return Out(x)\n"
    )
    for name, fields in (("one", "a: torch.Tensor"), ("other", "b: torch.Tensor; c: int = 3")):
        project(tmp_path / name, name)
        (tmp_path / name / "model.py").write_text(code.format(fields=fields))
        net = torch.jit.script(load(tmp_path / name, "model.py:Net")())
        assert torch.equal(net(torch.ones(2))[0], torch.ones(2))
