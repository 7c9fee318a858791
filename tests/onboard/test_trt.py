"""An application's engine: through TensorRT's Python module and libcudart, here against stand-ins for both.

On a machine with an NVIDIA GPU and TensorRT the last test builds and runs a real engine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgeopt
from edgeopt import onboard
from edgeopt.errors import DeviceError
from edgeopt.flows.prepare import prepare
from edgeopt.onboard import cudart, trt_measured
from edgeopt.ports.connect import connect
from edgeopt.spec.manifest import TensorSpec
from tests import tensorrt_module
from tests.recorded_trtexec import MARK
from tests.tensorrt_device import install, with_engines
from tests.tiny import case_inputs, expected


@pytest.fixture
def device(tmp_path, monkeypatch):
    """device(ARTIFACT, VERSION of the module): the release, with an engine that trtexec of VERSION 'built'."""
    monkeypatch.setattr(cudart, "_NAMES", (str(tensorrt_module.cudart()),))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)

    def make(artifact, module: str = "8.5.2.2", built: str | None = None):
        built = built or ".".join(module.split(".")[:3])
        monkeypatch.setenv("PATH", f"{install(tmp_path / 'jetson', version=built)}:{os.environ['PATH']}")
        with connect(None) as connection:
            done = prepare(artifact, connection, root=str(tmp_path / "root"), python=sys.executable, poll_s=0.1)
        assert done.engines[0].status == "ready", done
        monkeypatch.syspath_prepend(str(tensorrt_module.write(tmp_path / "site", module, MARK)))
        return tmp_path / "root" / artifact.manifest.name / "releases" / artifact.digest

    yield make
    sys.modules.pop("tensorrt", None)


def held_blocks() -> int:
    return ctypes.CDLL(str(tensorrt_module.cudart())).held_blocks()


@pytest.mark.parametrize("module", ["8.2.1.9", "8.5.2.2", "10.3.0"])
def test_an_application_gets_the_models_numbers_at_every_size(device, tmp_path, module):
    release = device(with_engines(tmp_path / "a"), module)
    with onboard.load(release) as predictor:
        assert {"flag": "simulated", "value": MARK, "status": "applied", "message": MARK} in predictor.flags
        for x in (*case_inputs(), np.ones((8, 4), "f4"), np.ones((1, 4), "f4"), np.ones((5, 4), "f4")[:, ::-1]):
            np.testing.assert_allclose(predictor.predict({"x": x}), expected(x), rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match="n from 1 to 8"):
            predictor.predict({"x": np.ones((9, 4), "f4")})
    assert held_blocks() == 0


def test_edgeopt_load_takes_the_same_way(device, tmp_path):
    release = device(with_engines(tmp_path / "a"))
    with edgeopt.load(release, "tensorrt-fp16") as predictor:
        assert predictor.candidate == "tensorrt-fp16"


def test_another_tensorrt_than_the_engines_is_one_sentence(device, tmp_path):
    release = device(with_engines(tmp_path / "a"), "8.6.2", built="8.5.2")
    with pytest.raises(onboard.Failure, match="TensorRT was 8.5.2 and is 8.6.2; run 'edgeopt prepare") as failed:
        onboard.load(release)
    assert failed.value.kind == "missing-runtime"
    with pytest.raises(DeviceError, match="TensorRT was 8.5.2"):
        edgeopt.load(release)


def whole_numbers() -> bytes:
    """ids (n, 4) int64 -> ids + 1, int64: as the indices of a detector (case O05)."""
    one = onnx.numpy_helper.from_array(np.int64(1), "one")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["output"])], "whole",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 4])],
        [helper.make_tensor_value_info("output", TensorProto.INT64, ["n", 4])], [one],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7).SerializeToString()


@pytest.mark.parametrize("module", ["8.5.2.2", "10.3.0"])
def test_whole_numbers_come_back_exactly_in_the_type_that_is_recorded(device, tmp_path, module):
    artifact = with_engines(
        tmp_path / "a", extra={"whole.onnx": whole_numbers()}, recipe={"onnx": "whole.onnx"}, cases=(),
        inputs=(TensorSpec(name="x", dtype="int64", shape=("n", 4)),),
        outputs=(TensorSpec(name="output", dtype="int64", shape=("n", 4)),),
    )  # fmt: skip
    with onboard.load(device(artifact, module)) as predictor:
        x = np.array([[1, -5, 2**31 - 2, 0]])
        found = predictor.predict({"x": x})
        assert found.dtype == np.int64 and np.array_equal(found, x + 1)
        if module.startswith("8"):
            with pytest.raises(onboard.Failure, match="values do not fit"):
                predictor.predict({"x": np.array([[2**40, 0, 0, 0]])})


def test_no_cuda_runtime_is_said(device, tmp_path, monkeypatch):
    release = device(with_engines(tmp_path / "a"))
    monkeypatch.setattr(cudart, "_NAMES", ("libcudart-that-is-not-there.so",))
    monkeypatch.setattr(cudart.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(onboard.Failure, match="no CUDA runtime"):
        onboard.load(release)


def test_a_gpu_without_memory_is_said(device):
    with pytest.raises(onboard.Failure, match="cudaMalloc failed: out of memory") as failed:
        cudart.Cudart().allocate(2 << 30)
    assert failed.value.kind == "memory"


SPECS = [{"name": "scores", "dtype": "float32", "shape": ["n", 2]}, {"name": "ids", "dtype": "int64", "shape": ["n"]}]
EXPORTED = """[
  { "name" : "ids"
  , "dimensions" : "2"
  , "values" : [ 3, -4 ]
  }
, { "name" : "scores"
  , "dimensions" : "2x2"
  , "values" : [ 1.5, -nan, inf, -inf ]
  }
]
"""


def test_what_trtexec_exports_is_read_with_what_json_has_no_word_for():
    scores, ids = trt_measured.read_outputs(EXPORTED, SPECS)
    np.testing.assert_array_equal(scores, np.array([[1.5, np.nan], [np.inf, -np.inf]], "f4"))
    assert ids.dtype == np.int64 and ids.tolist() == [3, -4]
    with pytest.raises(onboard.Failure, match="no output 'boxes': ids, scores"):
        trt_measured.read_outputs(EXPORTED, [{"name": "boxes", "dtype": "float32", "shape": []}])


def test_the_window_of_the_calls_is_what_trtexec_says_before_it_says_so():
    said = "[09/01/2025-18:07:04] [I] Timing trace has 126 queries over 3.0734 s"
    assert trt_measured.read_window(said, 10.0) == [10.0 - 3.0734, 10.0, 126]
    for other in (
        "",
        "Starting inference",
        "Warmup completed 6 queries over 200 ms",
        said[:-2],
        said.replace("3.", "3.."),
    ):
        assert trt_measured.read_window(other, 10.0) is None


def test_times_are_trtexecs_latencies():
    text = '[\n  { "startEnqMs" : 0.2, "computeMs" : 1.0, "latencyMs" : 1.25 }\n, { "latencyMs" : 2.5 }\n]\n'
    assert trt_measured.read_times(text) == [0.00125, 0.0025]


def test_on_a_gpu_a_real_engine_gives_the_models_numbers(tmp_path):
    """The one test of this file that needs the hardware: nothing of it is simulated."""
    reasons = [
        reason for here, reason in (
            (shutil.which("nvidia-smi") or os.path.exists("/etc/nv_tegra_release"), "no NVIDIA GPU"),
            (shutil.which("trtexec") or os.path.exists("/usr/src/tensorrt/bin/trtexec"), "no trtexec"),
            (onboard.adaptors.environment.version("tensorrt"), "no tensorrt for Python"),
        ) if not here
    ]  # fmt: skip
    if reasons:
        pytest.skip("needs a GPU with TensorRT, here there is " + ", ".join(reasons))
    artifact = with_engines(tmp_path / "a", recipe={"flags": ()})
    with connect(None) as connection:
        done = prepare(artifact, connection, root=str(tmp_path / "root"), python=sys.executable)
    done.check()
    assert done.simulated is None and done.facts["sm"]
    with onboard.load(tmp_path / "root" / "tiny" / "releases" / artifact.digest) as predictor:
        for x in case_inputs():
            np.testing.assert_allclose(predictor.predict({"x": x}), expected(x), rtol=1e-2, atol=1e-2)
