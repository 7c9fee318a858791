"""docs/runtime.md: its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeopt.spec.adaptive import Adaptive
from edgeopt.spec.project import load_project
from tests.tiny import tiny_artifact

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "runtime.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_an_application_loads_and_predicts(tmp_path, monkeypatch, capsys):
    tiny_artifact(tmp_path, torchscript=False, adaptive=Adaptive(specialise=({"n": 2},)))
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[0], {})
    assert capsys.readouterr().out.startswith("onnxruntime-fp32 (2, 3) Statistics(hits=")


def test_the_sizes_are_a_projects(tmp_path):
    (tmp_path / "model.py").touch()
    head = "name: m\nmodel: model.py:build\ninputs: {image: {shape: [1, 3, height, width]}}\n"
    (tmp_path / "edgeopt.yaml").write_text(head + blocks("yaml")[0])
    assert load_project(tmp_path).adaptive.specialise[1] == {"height": 320, "width": 256}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_of_your_own():
    exec(blocks("python")[2], {})


def test_every_figure_of_the_statistics_is_explained():
    from edgeopt.onboard.adaptive import Statistics

    assert [name for name in Statistics._fields if f"`{name}`" not in PAGE] == []
