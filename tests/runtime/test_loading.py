from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import edgeopt
from edgeopt.errors import ArtifactError, DeviceError
from edgeopt.spec.manifest import Selection
from tests.tiny import candidate, expected, tiny_artifact

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def artifact(tmp_path):
    return tiny_artifact(tmp_path, torchscript=False)


def test_predicts_on_the_host(artifact):
    with edgeopt.load(str(artifact.folder)) as predictor:
        np.testing.assert_allclose(predictor.predict({"x": X}), expected(X), rtol=1e-5, atol=1e-6)


def test_an_artifact_that_changed_is_refused(artifact):
    path = artifact.folder / "float.onnx"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="changed since it was built"):
        edgeopt.load(artifact.folder)


def test_an_unknown_candidate_is_refused(artifact):
    with pytest.raises(ArtifactError, match="no candidate 'int8'"):
        edgeopt.load(artifact.folder, "int8")
    artifact.write_selection(Selection(candidate="gone", decided_by="build", where="h", reason="r", verdict="only"))
    with pytest.raises(ArtifactError, match="no candidate 'gone'"):
        edgeopt.load(artifact.folder)


def test_a_candidate_that_this_machine_cannot_run_is_said(tmp_path):
    artifact = tiny_artifact(tmp_path, torchscript=False, candidates=[candidate("engine", "tensorrt", "float.onnx")])
    with pytest.raises(DeviceError, match="no tensorrt: install"):
        edgeopt.load(artifact.folder)


def test_loading_imports_no_more_than_it_needs(artifact):
    code = (
        "import sys, edgeopt.runtime\n"
        "assert 'numpy' not in sys.modules\n"
        "from edgeopt import load\n"
        f"load({str(artifact.folder)!r}).close()\n"
        "assert 'torch' not in sys.modules and 'paramiko' not in sys.modules\n"
        "assert callable(load)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
