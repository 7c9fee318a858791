"""The runner's adaptor for OpenVINO: properties as flags, names, threads, and what it can never run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from edgeopt import onboard
from edgeopt.onboard import environment
from edgeopt.runtime import tensors
from edgeopt.spec.manifest import TensorRef, TensorSpec
from tests.onboard.asking import ask, request_of
from tests.tiny import AXES, candidate, expected, onnx_model, tiny_artifact


def openvino_artifact(folder, **fields):
    chosen = candidate("openvino-fp32", "openvino", "float.onnx", **fields)
    return tiny_artifact(folder, torchscript=False, candidates=[chosen])


def test_the_packed_runner_measures_it_beside_onnxruntime(tmp_path):
    both = [candidate(f"{name}-fp32", name, "float.onnx") for name in ("onnxruntime", "openvino")]
    artifact = tiny_artifact(tmp_path, torchscript=False, candidates=both)
    measure = {"feed": "reference/0", "rounds": 2, "calls": 5, "warmup": 1, "max_s": 10}
    response = ask(artifact, request_of(artifact, tmp_path / "out", measure=measure), tmp_path)
    assert response["environment"]["runtimes"]["openvino"]
    x = tensors.read(artifact.folder, artifact.manifest.reference[0].inputs["x"])
    for result in response["candidates"].values():
        assert result["failure"] is None and [len(calls) for calls in result["rounds_s"]] == [5, 5]
        got = tensors.read(tmp_path / "out", TensorRef(**result["outputs"]["reference/0"]["output"]))
        np.testing.assert_allclose(got, expected(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", range(AXES["n"].min, AXES["n"].max + 1))
def test_every_size_of_the_axis_is_right(size, tmp_path):
    x = np.random.default_rng(size).normal(size=(size, 4)).astype(np.float32)
    flags = {"inference_precision": "f32"}
    with onboard.load(openvino_artifact(tmp_path, flags=flags).folder) as predictor:
        np.testing.assert_allclose(predictor.predict({"x": x}), expected(x), rtol=1e-5, atol=1e-6)
        assert [(r["flag"], r["status"]) for r in predictor.flags] == [("inference_precision", "applied")]


FLAGS = {
    "threads": ({"intra_op_threads": 1}, "applied", ""),
    "threads left open": ({"intra_op_threads": None}, "applied", ""),
    "throughput": ({"performance_hint": "throughput"}, "applied", ""),
    "streams": ({"streams": 1}, "applied", ""),
    "no such hint": ({"performance_hint": "warp"}, "refused", "latency, throughput"),
    "no such precision": ({"inference_precision": "f8"}, "refused", "bf16, f16, f32"),
    "no number": ({"streams": True}, "refused", "number"),
    "no threads": ({"intra_op_threads": 0}, "refused", "number"),
    "unknown": ({"turbo": True}, "missing", "does not know"),
}


@pytest.mark.parametrize("flags, status, said", FLAGS.values(), ids=FLAGS)
def test_properties_are_reported_as_flags_and_a_wrong_one_is_no_failure(flags, status, said, tmp_path):
    x = np.ones((2, 4), np.float32)
    with onboard.load(openvino_artifact(tmp_path, flags=flags).folder) as predictor:
        (record,) = predictor.flags
        assert record["status"] == status and said in record["message"]
        assert predictor.predict({"x": x}).shape == (2, 3)


@pytest.mark.parametrize("given, status", [(None, "applied"), (2, "applied"), (1, "refused")])
def test_threads_of_the_request_win_and_that_is_said(given, status, tmp_path):
    artifact = openvino_artifact(tmp_path, flags={"intra_op_threads": given})
    with onboard.load(artifact.folder, threads=2) as predictor:
        assert [record["status"] for record in predictor.flags] == [status]


def test_a_file_with_other_names_than_the_manifests_is_a_load_failure(tmp_path):
    artifact = openvino_artifact(tmp_path)
    model = onnx_model()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "other"
    onnx.save(model, artifact.folder / "float.onnx")
    with pytest.raises(onboard.Failure, match="'other'") as caught:
        onboard.load(artifact.folder)
    assert caught.value.kind == "load"


def test_a_broken_file_and_a_bfloat16_tensor_are_load_failures(tmp_path):
    artifact = openvino_artifact(tmp_path)
    (artifact.folder / "float.onnx").write_bytes(b"no model")
    with pytest.raises(onboard.Failure) as caught:
        onboard.load(artifact.folder)
    assert caught.value.kind == "load"
    (tmp_path / "half").mkdir()
    spec = (TensorSpec(name="x", dtype="bfloat16", shape=("n", 4)),)
    chosen = candidate("openvino-fp32", "openvino", "float.onnx")
    half = tiny_artifact(tmp_path / "half", torchscript=False, candidates=[chosen], inputs=spec)
    with pytest.raises(onboard.Failure, match="bfloat16"):
        onboard.load(half.folder)


def test_it_loads_without_torch(tmp_path):
    import subprocess
    import sys

    artifact = openvino_artifact(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1] + '/onboard.pyz'); import onboard, numpy\n"
        "with onboard.load(sys.argv[1]) as p: print(p.predict({'x': numpy.ones((2, 4), 'f')}).shape)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(artifact.folder)], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "(2, 3)\n"), done.stderr


BF16_HERE = {"amx_bf16", "avx512_bf16"} & set(environment.describe()["cpu_flags"])


def test_a_bf16_candidate_computes_in_bf16_or_is_refused_by_a_cpu_without_it(tmp_path):
    asked = {"inference_precision": "bf16"}
    chosen = candidate("openvino-bf16", "openvino", "float.onnx", precision="bf16", flags=asked)
    artifact = tiny_artifact(tmp_path, torchscript=False, candidates=[chosen])
    result = ask(artifact, request_of(artifact, tmp_path / "out"), tmp_path)["candidates"]["openvino-bf16"]
    if BF16_HERE:
        assert result["failure"] is None
        assert [(r["flag"], r["status"]) for r in result["flags"]] == [("inference_precision", "applied")]
    else:
        assert result["failure"]["kind"] == "load"
        assert result["failure"]["message"] == "OpenVINO computes in f32 on this CPU, not in bf16"


def test_a_candidate_in_fp32_goes_on_where_the_cpu_has_no_bf16(tmp_path):
    artifact = openvino_artifact(tmp_path, flags={"inference_precision": "bf16"})
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    with onboard.load(artifact.folder) as predictor:
        (said,) = predictor.flags
        assert said["status"] == ("applied" if BF16_HERE else "refused")
        np.testing.assert_allclose(predictor.predict({"x": x}), expected(x), atol=0.1 if BF16_HERE else 1e-5)
