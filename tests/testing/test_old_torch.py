"""An artifact of `--profile xavier` under the runtimes that a Xavier has: torch 2.1.2 and onnxruntime 1.16.3, aarch64.

The device is the virtual Jetson, over SSH, with the artifact's own runner; the file was test-loaded by the same torch
when it was built. Over 20 s, since the emulated torch is imported twice; nothing quicker shows what an old torch loads.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeopt.errors import EdgeoptError
from edgeopt.runtime.artifact import Artifact
from edgeopt.testing import virtual_device, wheels
from edgeopt.testing.target_python import target_python
from tests.conftest import absent
from tests.flows.test_build_custom_ops import HERE, write
from tests.native import ort_library
from tests.small_project import run_edgeopt
from tests.testing import old_torch_project

FEW = ("--rounds", "1", "--calls", "1", "--no-sensors")  # times say nothing there
PATIENCE_S = 1500


@pytest.fixture(scope="module")
def layer(virtual_jetson_cache) -> Path:
    try:
        return wheels.layer(virtual_jetson_cache, *wheels.TORCH, *wheels.ONNXRUNTIME)
    except EdgeoptError as why:
        absent(f"no aarch64 wheels: {why.what}")


@pytest.fixture(scope="module")
def xavier(virtual_jetson_cache, layer):
    with virtual_device(cache=virtual_jetson_cache, layers=(layer,)) as device:
        yield device


def build(folder: Path, *argv: str) -> Artifact:
    done = run_edgeopt("build", "--profile", "xavier", *argv, "--json", cwd=folder, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return Artifact.open(next(folder.glob("[!.]*.edgeopt")))


def validate(artifact: Artifact, device) -> dict:
    argv = ["validate", str(artifact.folder), device.host, "--ssh-config", str(device.config), *FEW, "--json"]
    done = run_edgeopt(*argv, cwd=artifact.folder.parent, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(max((artifact.folder / "reports").glob("*.json")).read_text())


@pytest.fixture(scope="module")
def everything(tmp_path_factory, virtual_jetson_cache, layer) -> Artifact:
    folder = old_torch_project.write(tmp_path_factory.mktemp("everything"))
    python = target_python(tmp_path_factory.mktemp("target"), (layer,), virtual_jetson_cache)
    only = ("--set", "profile.backends=[torchscript, onnxruntime]", "--set", "profile.precision.allowed=[fp32, int8]")
    return build(folder, *only, "--target-python", str(python))


@pytest.fixture(scope="module")
def report(everything, xavier) -> dict:
    return validate(everything, xavier)


def test_every_candidate_loads_and_gives_the_right_outputs(report):
    found = {c["name"]: c for c in report["candidates"]}
    assert {"torchscript-fp32", "onnxruntime-fp32", "onnxruntime-int8"} <= set(found)
    assert {name: c["failure"] for name, c in found.items()} == dict.fromkeys(found)
    for name, candidate in found.items():
        assert candidate["sqnr_db"] > (20 if candidate["precision"] == "int8" else 80), name
    runtimes = report["environment"]["runtimes"]
    assert (runtimes["torch"], runtimes["onnxruntime"]) == ("2.1.2", "1.16.3")
    assert report["environment"]["machine"] == "aarch64"


def test_its_figures_are_marked_and_decide_nothing(report):
    assert report["emulated"].startswith("qemu-user") and report["verdict"] == "undecided"
    assert report["reason"].startswith("EMULATED (qemu-user")
    assert not [c for c in report["checks"] if c["verdict"] == "fail"]


STRUCTURE = """
import sys
sys.path.insert(0, "onboard.pyz")
import numpy, onboard
with onboard.load(".", candidate="onnxruntime-fp32") as predictor:
    found = predictor.predict({"image": numpy.full((1, 3, 16, 16), 0.5, numpy.float32)})
print(sorted(found), type(found["more"]).__name__, len(found["more"]), found["more"][1])
"""


def test_outputs_have_the_structure_that_forward_returns(report, everything, xavier):
    """Case C09: a dict with a tuple that holds None, on the device."""
    done = on(xavier, everything, STRUCTURE)
    assert done.stdout == "['more', 'scores'] tuple 2 None\n", done.stderr[-2000:]


GAINED = """
import json, sys
sys.path.insert(0, "onboard.pyz")
import numpy, onboard
images = numpy.linspace(-1, 1, 2 * 144, dtype=numpy.float32).reshape(2, 1, 12, 12)
with onboard.load(".", candidate="onnxruntime-fp32") as predictor:
    print(json.dumps(predictor.predict({"image": images})["scores"].tolist()))
"""


def test_a_library_of_the_users_operators_travels_and_is_loaded_first(tmp_path, xavier):
    """Case G09, in a process of the device's that knows nothing of the model: compiled for aarch64 here."""
    libraries = ["native/libort.so", "native/libort-aarch64.so"] if HERE != "aarch64" else ["native/libort.so"]
    mapped = {"bars_ops::gain": {"node": "acme::Scale", "onnxruntime": libraries}}
    folder = write(tmp_path / "project", custom_ops=mapped, without=("train", "loss", "calibration", "qat"))
    shutil.copy(ort_library("aarch64"), folder / libraries[-1])
    artifact = build(folder, "--set", "profile.backends=[onnxruntime]", "--set", "profile.precision.allowed=[fp32]")
    report = validate(artifact, xavier)
    assert [(c["name"], c["failure"]) for c in report["candidates"]] == [("onnxruntime-fp32", None)]
    done = on(xavier, artifact, GAINED)
    assert done.returncode == 0, done.stderr[-2000:]
    images = np.linspace(-1, 1, 2 * 144, dtype=np.float32).reshape(2, 1, 12, 12)
    np.testing.assert_allclose(json.loads(done.stdout), predicted_here(artifact, images), atol=1e-4)


def predicted_here(artifact: Artifact, images: np.ndarray) -> np.ndarray:
    """The unoptimised model's scores: the project's own module, in a process of its own."""
    code = "import sys, numpy, torch, model\nimages = numpy.load(sys.argv[1])\n"
    code += "print(model.gained().eval()(torch.from_numpy(images))['scores'].tolist())"
    folder = artifact.folder.parent
    np.save(folder / "images.npy", images)
    argv = [sys.executable, "-c", code, "images.npy"]
    return np.array(json.loads(subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout))


def on(device, artifact: Artifact, code: str) -> subprocess.CompletedProcess:
    """A program in the release's folder on the device."""
    release = f"~/.edgeopt/{artifact.manifest.name}/releases/{artifact.digest}"
    argv = ["ssh", "-F", str(device.config), device.host, f"cd {release} && python3 -"]
    return subprocess.run(argv, input=code, capture_output=True, text=True, timeout=PATIENCE_S)
