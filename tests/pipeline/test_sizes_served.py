"""What an artifact says of sizes: whole, within their axes, and padding only where it was found to change no answer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import edgeopt
from edgeopt.capture.capture import capture
from edgeopt.errors import ProjectError
from edgeopt.pipeline import sizes_served
from edgeopt.progress import SILENT
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec import manifest as spec
from edgeopt.spec.adaptive import Adaptive
from edgeopt.spec.project import load_project
from tests.small_project import run_edgeopt
from tests.tiny import tiny_artifact


class Frames(nn.Module):
    """mel [n, t, 4] -> each frame by itself: padding adds frames and touches none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, mel):
        return self.linear(mel).relu()


class Sum(nn.Module):
    def forward(self, mel):
        return mel.sum(1)


class Mean(nn.Module):
    def forward(self, mel):
        return mel.mean(1)


class Largest(nn.Module):
    """Zeros are the largest of negative values, and hide behind positive ones."""

    def forward(self, mel):
        return mel.amax(1)


class Smooth(nn.Module):
    """A convolution with a bias along t, then a sum: the bias is counted at padded frames too."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 3, 3, padding=1)

    def forward(self, mel):
        return self.conv(mel.transpose(1, 2)).sum(2)


class Half(nn.Module):
    """An output axis that no input has, t // 2, which nobody can cut back."""

    def forward(self, mel):
        return mel[:, ::2]


class Backwards(nn.Module):
    def forward(self, mel):
        return mel.flip(1)


class Count(nn.Module):
    """An integer that follows the size."""

    def forward(self, mel):
        return mel.sum(1), torch.full((1,), mel.shape[1])


def captured(model: nn.Module, tmp_path, **changes):
    """The model as captured for mel [1, t, 4], t from 1 to 40."""
    torch.manual_seed(0)
    values = {
        "name": "m", "model": "model.py:build", "inputs": {"mel": {"shape": [1, "t", 4]}},
        "axes": {"t": {"min": 1, "opt": 10, "max": 40}}, **changes,
    }  # fmt: skip
    (tmp_path / "edgeopt.yaml").write_text(json.dumps(values))
    (tmp_path / "model.py").write_text(f"from {__name__} import {type(model).__name__} as build\n")
    project = load_project(tmp_path)
    return capture(project, progress=SILENT), project


SAFE = {"frame by frame": Frames, "a sum": Sum}
UNSAFE = {
    "a mean": (Mean, "differs by"),
    "a largest": (Largest, "differs by"),
    "a bias along the axis": (Smooth, "differs by"),
    "an axis of its own": (Half, "shape"),
    "the other way round": (Backwards, "differs by"),
    "a count": (Count, "integers differ"),
}


@pytest.mark.parametrize("model", SAFE.values(), ids=SAFE)
def test_padding_is_kept_where_no_answer_changes(tmp_path, model):
    program, project = captured(model(), tmp_path, adaptive={"pad": {"t": 8}})
    assert sizes_served.adaptive(program, project).pad == {"t": 8}


@pytest.mark.parametrize("model, said", UNSAFE.values(), ids=UNSAFE)
def test_padding_that_changes_an_answer_is_left_out_and_told(tmp_path, caplog, model, said):
    program, project = captured(model(), tmp_path, adaptive={"specialise": [{"t": 12}], "pad": {"t": 8}})
    found = sizes_served.adaptive(program, project)
    assert found.pad == {} and found.specialise == ({"t": 12},)
    assert said in sizes_served.unsafe(program, project.adaptive)
    assert "padding t: left out" in caplog.text


def test_the_users_word_is_taken(tmp_path):
    program, project = captured(Mean(), tmp_path, adaptive={"pad": {"t": 8}, "pad_check": False})
    assert sizes_served.adaptive(program, project).pad == {"t": 8}


def test_sizes_are_made_whole_by_the_usual_ones(tmp_path):
    axes = {"t": {"min": 1, "opt": 10, "max": 40}, "n": {"min": 1, "opt": 2, "max": 4}}
    program, project = captured(
        Frames(), tmp_path, inputs={"mel": {"shape": ["n", "t", 4]}}, axes=axes,
        adaptive={"specialise": [{"t": 12}, {"n": 1, "t": 9}]},
    )  # fmt: skip
    assert sizes_served.adaptive(program, project).specialise == ({"t": 12, "n": 2}, {"t": 9, "n": 1})


WRONG = {
    "unknown axis": ({"specialise": [{"tt": 3}]}, "'adaptive.specialise.0': there is no axis 'tt'"),
    "near": ({"specialise": [{"t": 3}, {"time": 3}]}, "'adaptive.specialise.1': there is no axis 'time'"),
    "above": ({"specialise": [{"t": 41}]}, "t is 41, and its axis goes from 1 to 40"),
    "zero": ({"specialise": [{"t": 0}]}, "greater than or equal to 1"),
    "pad of an unknown axis": ({"pad": {"m": 8}}, "'adaptive.pad.m': there is no axis 'm'"),
    "pad to one": ({"pad": {"t": 1}}, "greater than or equal to 2"),
    "more than may be kept": ({"specialise": [{"t": 3}, {"t": 4}], "entries": 1}, "2 sizes are to be ready, and 1 may"),
    "unknown key": ({"specialize": []}, "did you mean 'specialise'"),
}


@pytest.mark.parametrize("given, said", WRONG.values(), ids=WRONG)
def test_a_project_that_contradicts_itself_is_refused(tmp_path, given, said):
    with pytest.raises(ProjectError, match=said.replace("(", r"\(")):
        captured(Frames(), tmp_path, adaptive=given)


def test_a_manifest_without_sizes_has_the_digest_that_it_had(tmp_path):
    manifest = tiny_artifact(tmp_path, torchscript=False).manifest
    assert b"adaptive" not in spec.encode(manifest)
    with_sizes = manifest.model_copy(update={"adaptive": Adaptive(specialise=({"n": 2},))})
    assert spec.digest(with_sizes) != spec.digest(manifest)
    assert spec.decode(spec.encode(with_sizes), source="here").adaptive == with_sizes.adaptive


MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
"""


def test_an_artifact_is_built_with_its_sizes_and_serves_them(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    values = {
        "name": "moving", "model": "model.py:build", "inputs": {"input": {"shape": [1, 3, "height", "width"]}},
        "axes": {"height": {"min": 8, "opt": 16, "max": 64}, "width": {"min": 8, "opt": 24, "max": 64}},
        "adaptive": {"specialise": [{"height": 16, "width": 24}, {"height": 32}], "memory_mb": 64},
    }  # fmt: skip
    (tmp_path / "edgeopt.yaml").write_text(json.dumps(values))
    quick = [
        part for key in ("precision.allowed=[fp32]", "backends=[onnxruntime]") for part in ("--set", f"profile.{key}")
    ]
    done = run_edgeopt("build", "--profile", "x86-cpu", *quick, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    artifact = Artifact.open(tmp_path / "moving.edgeopt")
    assert artifact.manifest.adaptive.specialise == ({"height": 16, "width": 24}, {"height": 32, "width": 24})
    for candidate in artifact.manifest.candidates:
        with edgeopt.load(artifact.folder, candidate.name) as predictor:
            ready = predictor.statistics()
            assert ready.builds + ready.declined == 2 and ready.failures == 0
            for size in ((16, 24), (32, 24), (9, 31)):
                x = np.random.default_rng(0).normal(size=(1, 3, *size)).astype(np.float32)
                assert predictor.predict({"input": x}).shape == (1, 4, *size)
