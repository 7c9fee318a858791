"""A build for a Xavier with its DLA, and the artifact's engines on a device with a recorded trtexec."""

from __future__ import annotations

import os
import sys

from edgeopt.flows.prepare import prepare
from edgeopt.ports.connect import connect
from edgeopt.runtime.artifact import Artifact
from tests.small_project import run_edgeopt, write_project
from tests.tensorrt_device import install

ONE_BY_ONE = """
def calibration():
    images, _ = bars(16, 1)
    for i in range(16):
        yield {"image": images[i : i + 1]}
"""
STILL = {"inputs": {"image": {"shape": [1, 1, 12, 12]}}, "axes": {}}


def test_a_build_with_the_dla_holds_its_recipes_and_their_files(tmp_path, monkeypatch):
    """One test: the build is most of its time, and what the device makes of it is the proof of its files."""
    project = write_project(
        tmp_path / "bars", without=("train", "loss", "qat", "evaluate", "limits"), data_code=ONE_BY_ONE, **STILL
    )
    done = run_edgeopt("build", "--profile", "xavier", "--set", "profile.dla=true", cwd=project)
    assert done.returncode == 0, done.stderr
    artifact = Artifact.open(project / "bars.edgeopt")
    recipes = {recipe.candidate: recipe for recipe in artifact.manifest.engine_recipes}
    names = {"tensorrt-fp32", "tensorrt-fp16", "tensorrt-int8", "tensorrt-fp16-dla", "tensorrt-int8-dla"}
    assert set(recipes) == {c.name for c in artifact.manifest.candidates if c.runtime == "tensorrt"} == names
    assert all(recipe.shapes == {} for recipe in recipes.values())
    assert recipes["tensorrt-int8-dla"].files == ("int8_dla.onnx", "int8_dla.calib")
    assert set(recipes["tensorrt-int8-dla"].files) <= set(artifact.manifest.files)

    monkeypatch.setenv("PATH", f"{install(tmp_path / 'jetson', version='8.6.3')}:{os.environ['PATH']}")
    with connect(None) as connection:
        ready = prepare(artifact, connection, root=str(tmp_path / "root"), python=sys.executable, poll_s=0.5)
    ready.check()
    assert {engine.candidate for engine in ready.engines} == names
    (dla,) = [engine for engine in ready.engines if engine.candidate == "tensorrt-int8-dla"]
    command = (tmp_path / "root" / "engines" / dla.passport / "log").read_text().splitlines()[0]
    assert "--useDLACore=0 --allowGPUFallback" in command and "--int8" in command and "Shapes" not in command
    calibration = (tmp_path / "root" / "engines" / dla.passport / "calibration").read_text()
    assert calibration.startswith("TRT-8603-EntropyCalibration2\n") and "\nimage: " in calibration
