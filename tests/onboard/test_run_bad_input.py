"""What the runner answers where a request, a file or a disk is bad."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from edgeopt.runtime.artifact import Artifact
from tests.onboard.asking import MEASURE, ask, request_of
from tests.tiny import tiny_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    return tiny_artifact(tmp_path_factory.mktemp("artifact"))


def only(artifact: Artifact, tmp_path: Path, name: str = "onnxruntime-fp32", **changes) -> dict:
    """The result of one candidate, its fields changed by `changes`, for a request of just this one."""
    request = request_of(artifact, tmp_path / "out")
    chosen = [c for c in request["candidates"] if c["name"] == name][0]
    request["candidates"] = [{**chosen, **changes}]
    return ask(artifact, request, tmp_path)["candidates"][name]


def test_a_full_disk_is_said(artifact, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "onnxruntime-fp32.bin").symlink_to("/dev/full")
    failure = only(artifact, tmp_path)["failure"]
    assert failure["kind"] == "space"
    assert "the disk of the device is full" in failure["message"]


def test_no_space_for_the_response_is_an_exit_status(artifact, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "q.json").write_text(json.dumps(request_of(artifact, tmp_path / "out", candidates=[])))
    (tmp_path / "r.json.part").symlink_to("/dev/full")
    argv = [sys.executable, str(artifact.folder / "onboard.pyz"), "run"]
    done = subprocess.run([*argv, str(tmp_path / "q.json"), str(tmp_path / "r.json")], capture_output=True)
    assert done.returncode == 28
    assert b"No space left on device" in done.stderr and b"Traceback" not in done.stderr
    assert not (tmp_path / "r.json").exists()


def test_an_unknown_runtime_and_an_unbuilt_engine_are_said(artifact, tmp_path):
    assert "no trtexec on its PATH" in only(artifact, tmp_path, runtime="tensorrt")["failure"]["message"]
    failure = only(artifact, tmp_path, runtime="tflite")["failure"]
    assert failure["kind"] == "missing-runtime" and "'tflite'" in failure["message"]


@pytest.mark.parametrize("name, file", [("onnxruntime-fp32", "broken.onnx"), ("torchscript-fp32", "broken.pt")])
@pytest.mark.parametrize("content", [b"", b"\x08\x07garbage" * 100, "half"], ids=["empty", "garbage", "half"])
def test_a_broken_model_file_is_a_load_failure(artifact, tmp_path, name, file, content):
    if content == "half":
        whole = (artifact.folder / file.replace("broken", "float")).read_bytes()
        content = whole[: len(whole) // 2]
    (artifact.folder / file).write_bytes(content)
    failure = only(artifact, tmp_path, name, file=file)["failure"]
    assert failure["kind"] == "load" and failure["message"]


def test_a_missing_model_file_is_a_load_failure(artifact, tmp_path):
    assert only(artifact, tmp_path, file="gone.onnx")["failure"]["kind"] == "load"


def test_outputs_of_another_dtype_are_refused(artifact, tmp_path):
    """An index output that is declared int64 and comes as int32 must not pass for equal."""
    node = helper.make_node("Cast", ["x"], ["output"], to=TensorProto.INT32)
    graph = helper.make_graph(
        [node], "cast", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("output", TensorProto.INT32, ["n", 4])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, artifact.folder / "cast.onnx")
    request = request_of(artifact, tmp_path / "out")
    request["candidates"] = [{**request["candidates"][0], "file": "cast.onnx"}]
    request["outputs"] = [{"name": "output", "dtype": "int64", "shape": ["n", 4]}]
    failure = ask(artifact, request, tmp_path)["candidates"]["onnxruntime-fp32"]["failure"]
    assert failure == {
        "kind": "run", "message": "output 'output' is int32, the manifest says int64", "signal": None,
    }  # fmt: skip


@pytest.mark.parametrize("shape, said", [(["n", 4], "(n, 4)"), (["n", 3, 1], "(n, 3, 1)"), (["n"], "(n)")])
def test_outputs_of_another_shape_are_refused(artifact, tmp_path, shape, said):
    request = request_of(artifact, tmp_path / "out")
    request["outputs"] = [{"name": "output", "dtype": "float32", "shape": shape}]
    for result in ask(artifact, request, tmp_path)["candidates"].values():
        assert result["failure"]["kind"] == "run"
        assert result["failure"]["message"] == f"output 'output' has shape (2, 3), the manifest says {said}"


def test_a_model_with_other_names_is_a_load_failure(artifact, tmp_path):
    request = request_of(artifact, tmp_path / "out")
    request["outputs"] = [{"name": "scores", "dtype": "float32", "shape": ["n", 3]}]
    failure = ask(artifact, request, tmp_path)["candidates"]["onnxruntime-fp32"]["failure"]
    assert failure["kind"] == "load" and "scores" in failure["message"]


def test_a_feed_that_is_cut_off_is_a_run_failure(artifact, tmp_path):
    request = request_of(artifact, tmp_path / "out")
    request["candidates"] = request["candidates"][:1]
    request["feeds"][0]["inputs"]["x"]["offset"] += 10**6
    failure = ask(artifact, request, tmp_path)["candidates"]["onnxruntime-fp32"]["failure"]
    assert failure["kind"] == "run" and "ends inside a tensor" in failure["message"]


def change(key, value):
    return lambda request: request.update({key: value})


BAD = {
    "protocol": (change("protocol", 2), "protocol 1, the request is of 2"),
    "missing": (lambda r: r.pop("feeds"), "missing key 'feeds'"),
    "unknown": (change("thread", 2), "unknown key 'thread'"),
    "type": (change("timeout_s", "long"), "'timeout_s' is of the wrong type"),
    "bool": (change("threads", True), "'threads' is of the wrong type"),
    "candidate": (change("candidates", [{"name": "a", "file": "b"}]), "candidates: missing key 'runtime'"),
    "name": (lambda r: r["candidates"][0].update(name="../x"), "not a plain name"),
    "file": (lambda r: r["candidates"][0].update(file="../../etc/passwd"), "leaves the folder"),
    "absolute": (change("op_libraries", ["/tmp/x.so"]), "leaves the folder"),
    "input": (lambda r: r["feeds"][0]["inputs"].clear(), "lacks input 'x'"),
    "measure": (change("measure", {**MEASURE, "feed": "none"}), "there is no feed 'none'"),
    "rounds": (change("measure", {**MEASURE, "rounds": 0}), "'rounds' must be at least 1"),
    "mode": (change("measure", {**MEASURE, "mode": "both"}), "'mode' is not one of: latency, throughput"),
    "streams": (change("measure", {**MEASURE, "streams": 0}), "'streams' must be at least 1"),
    "tune": (change("measure", {**MEASURE, "tune": "all"}), "'tune' is of the wrong type"),
}


@pytest.mark.parametrize("spoil, said", BAD.values(), ids=BAD)
def test_a_wrong_request_is_answered(artifact, tmp_path, spoil, said):
    request = request_of(artifact, tmp_path / "out")
    spoil(request)
    response = ask(artifact, request, tmp_path)
    assert response["failure"]["kind"] == "request"
    assert said in response["failure"]["message"]
    assert response["candidates"] == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_request_that_is_no_json_object_is_answered(artifact, tmp_path, text):
    (tmp_path / "q.json").write_bytes(text.encode("latin-1"))
    argv = [sys.executable, str(artifact.folder / "onboard.pyz"), "run"]
    subprocess.run([*argv, str(tmp_path / "q.json"), str(tmp_path / "r.json")], check=True)
    assert json.loads((tmp_path / "r.json").read_text())["failure"]["kind"] == "request"


@pytest.mark.parametrize("argv", [[], ["run"], ["walk", "a", "b"], ["environment", "x"]])
def test_a_wrong_command_line_is_usage(artifact, argv):
    done = subprocess.run([sys.executable, str(artifact.folder / "onboard.pyz"), *argv], capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith(b"usage:")
