"""What calibration finds, on screen and in build.json, with the layer's name."""

from __future__ import annotations

import json

import pytest

from tests.small_project import run_edgeopt, write_project

OUTLIER = """
def calibration():
    images, _ = bars(64, 1)
    images[40, 0, 3, 3] = 1000  # Q04
    for i in range(0, 64, 16):
        yield {"image": images[i : i + 16]}
"""
OFF_CENTRE = """
def calibration():
    images, _ = bars(64, 1)
    for i in range(0, 64, 16):
        yield {"image": images[i : i + 16].clip(0, 1) + 1000}  # Q05
"""


@pytest.mark.parametrize(
    "data, warning, left_float",
    [
        (OUTLIER, "image: outliers: the range ", []),
        (
            OFF_CENTRE,
            "image: kept float: values lie in 1000 to 1001, far from 0: only 0 of 255 steps are used",
            ["first"],
        ),
    ],
    ids=["Q04", "Q05"],
)
def test_ranges_that_cost_accuracy_are_named_on_screen_and_in_the_record(data, warning, left_float, tmp_path):
    folder = write_project(tmp_path, without=("train", "loss", "qat", "evaluate", "limits"), data_code=data)
    argv = ["--project", str(folder), "--out", str(tmp_path / "out.edgeopt"), "--profile", "x86-cpu", "--json"]
    done = run_edgeopt("build", *argv, "--set", "profile.quantization.ranges=minmax", "--until", "quantize")
    assert done.returncode == 0, done.stderr
    (stage,) = [stage for stage in json.loads(done.stdout)["stages"] if stage["name"] == "quantize"]
    assert any(line.startswith(warning) for line in stage["details"]["warnings"])
    assert [name.split(".")[0] for name in stage["details"]["left_float"]] == left_float
    shown = run_edgeopt("build", *argv[:-1], "--set", "profile.quantization.ranges=minmax", "--until", "quantize")
    assert f"warning: {warning}" in shown.stdout  # from the cache
