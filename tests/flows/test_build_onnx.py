"""Builds of ONNX files: int8 by onnxruntime's quantizer through the same stages and gates, or why there is none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn

import edgeopt
from edgeopt.runtime.artifact import Artifact
from tests.conftest import absent
from tests.quant.onnx_files import exported, weights, written
from tests.small_project import run_edgeopt

DATA = '''
import numpy as np

def rows(seed, count=32):
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)

def calibration():
    for seed in range(4):
        yield {"x": rows(seed, 8)}

def evaluate(predict):
    """Mean probability of class 0."""
    y = np.concatenate([predict({"x": rows(9)[i : i + 8]})["y"] for i in range(0, 32, 8)])
    e = np.exp(y - y.max(1, keepdims=True))
    return {"p0": float((e / e.sum(1, keepdims=True)).reshape(32, -1)[:, 0].mean())}
'''


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        return self.head((x + self.second(x)).mean((2, 3)))


def project(folder: Path, **values) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.py").write_text(DATA)
    common = {
        "name": "given", "model": "given.onnx", "calibration": "data.py:calibration",
        "inputs": {"x": {"shape": ["n", 3, 8, 8]}}, "axes": {"n": {"min": 1, "opt": 1, "max": 8}},
    }  # fmt: skip
    (folder / "edgeopt.yaml").write_text(json.dumps({**common, **values}))
    return folder


def build(folder: Path, out: Path) -> tuple[str, dict]:
    done = run_edgeopt("build", "--profile", "x86-cpu", "--project", str(folder), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "build.json").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    torch.manual_seed(0)
    folder = project(
        tmp_path_factory.mktemp("onnx") / "project", evaluate="data.py:evaluate", limits={"metric_drop": {"p0": 0.02}},
        keep_float=["/head"],
    )  # fmt: skip
    exported(Net(), folder / "given.onnx", 3, 8, 8, training=True)
    return folder, folder.parent / "given.edgeopt", *build(folder, folder.parent / "given.edgeopt")


def test_the_artifact_holds_both_candidates_judged_by_evaluate(built):
    _, out, printed, record = built
    artifact = Artifact.open(out)
    assert [c.name for c in artifact.manifest.candidates] == ["onnxruntime-fp32", "onnxruntime-int8"]
    metrics = artifact.manifest.metrics
    assert abs(metrics["onnxruntime-int8"]["p0"] - metrics["reference"]["p0"]) < 0.02
    assert all("p50_ms" in row["result"] for row in record["candidates"])
    assert "gate after reoptimize" in printed


def test_the_record_says_what_was_quantized(built):
    *_, record = built
    stages = {stage["name"]: stage for stage in record["stages"]}
    details = stages["quantize"]["details"]
    assert details["counts"]["convolution"] == {"quantized": 2, "float": 0}
    assert details["left_float"] == {"/head/Gemm": "kept float by the project"}
    assert 0.9 < details["coverage"] < 1
    assert stages["quantize"]["size_bytes"] < stages["capture"]["size_bytes"]
    assert stages["qat"]["skipped"] == "training needs a PyTorch model; this is an ONNX file"


def test_the_runtime_runs_integer_kernels(built, tmp_path):
    _, out, *_ = built
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(out / "int8.onnx"), options, providers=["CPUExecutionProvider"])
    kernels = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kernels["QLinearConv"] == 2 and kernels["QLinearAdd"] == 1 and not kernels["Conv"]


def test_int8_answers_as_the_file_given(built):
    folder, out, *_ = built
    x = np.random.default_rng(5).standard_normal((8, 3, 8, 8)).astype(np.float32)
    exact = onnxruntime.InferenceSession(str(folder / "given.onnx"), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )[0]
    with edgeopt.load(out, "onnxruntime-int8") as predictor:
        found = predictor.predict({"x": x})["y"]
    assert 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum()) > 25


def test_our_own_int8_is_recognised_and_left_alone(built, tmp_path):
    _, out, *_ = built
    folder = project(tmp_path / "project")
    (folder / "given.onnx").write_bytes((out / "int8.onnx").read_bytes())
    printed, record = build(folder, tmp_path / "again.edgeopt")
    assert "the model is quantized already and is left as it is" in printed
    assert [row["name"] for row in record["candidates"]] == ["onnxruntime-int8"]


def test_a_file_whose_int8_keeps_no_limit_ships_as_float_and_says_what_was_not_tried(built, tmp_path):
    """Its layers are not ranked as a graph of torch has them, and the build goes on."""
    lossy = project(tmp_path / "project", evaluate="data.py:spread", limits={"metric_drop": {"spread": 1e-4}})
    (lossy / "given.onnx").write_bytes((built[0] / "given.onnx").read_bytes())
    # ranges of far larger inputs than those that count, which all become the same step
    data = (lossy / "data.py").read_text().replace("seed, 8)}", "seed, 8) * 1e4}")
    data += 'def spread(predict):\n    return {"spread": float(predict({"x": rows(9)[:8]})["y"].std(0).mean())}\n'
    (lossy / "data.py").write_text(data)
    printed, record = build(lossy, tmp_path / "out.edgeopt")
    assert {c.precision for c in Artifact.open(tmp_path / "out.edgeopt").manifest.candidates} == {"fp32"}
    tries = {made["what"]: made["reason"] for made in record["mixed_precision"]["tries"]}
    assert "name nodes in 'keep_float'" in tries["int8 with layers float"]
    assert "name nodes in 'keep_float'" in printed


def branch(folder: Path) -> None:
    inside = [helper.make_node("Conv", ["x", "w"], ["inner"])]
    value = helper.make_tensor_value_info
    then = helper.make_graph(inside, "then", [], [value("inner", onnx.TensorProto.FLOAT, None)])
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["same"])], "else", [], [value("same", onnx.TensorProto.FLOAT, None)]
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    zero = onnx.numpy_helper.from_array(np.float32(0), "zero")
    written(nodes, [weights("w", 3, 3, 1, 1), zero], folder / "given.onnx", out=("n", 3, 8, 8))


def computed_weight(folder: Path) -> None:
    nodes = [
        helper.make_node("Softmax", ["v"], ["w"]),
        helper.make_node("Add", ["w", "one"], ["u"]),
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0, 2, 3], keepdims=1),
        helper.make_node("Mul", ["u", "m"], ["k"]),
        helper.make_node("Conv", ["x", "k"], ["y"]),
    ]
    one = onnx.numpy_helper.from_array(np.float32(1), "one")
    written(nodes, [weights("v", 2, 3, 1, 1), one], folder / "given.onnx", out=("n", 2, 8, 8))


@pytest.mark.parametrize(
    "make, reason",
    [
        (branch, "all of its layers lie in the bodies of If, which stay float"),
        (computed_weight, "Conv: its weight is computed in the graph"),
    ],
)
def test_what_cannot_be_quantized_is_built_as_float_with_the_reason(make, reason, tmp_path):
    """Refused before the stage, or found out by it: the build goes on either way."""
    folder = project(tmp_path / "project")
    make(folder)
    printed, _ = build(folder, tmp_path / "out.edgeopt")
    manifest = Artifact.open(tmp_path / "out.edgeopt").manifest
    assert [c.name for c in manifest.candidates] == ["onnxruntime-fp32"]
    assert reason in printed and any(reason in r.reason for r in manifest.refused)


def zoo(name: str) -> Path:
    path = Path(__file__).parents[2] / ".zoo" / "site" / name
    if not path.is_file():
        absent(f"{name} is not here: run scripts/fetch-zoo")
    return path


def test_a_file_of_somebody_else_is_quantized_and_their_int8_left_alone(tmp_path):
    """pulsevad 0.1.3, depthwise 1-D convolutions: its float file, and the int8 file that its author made of it."""
    from edgeopt.capture import onnx_file
    from edgeopt.quant import onnx_ptq
    from edgeopt.spec.project import project_for_model
    from tests.quant.programs import quantization

    def captured(file: Path):
        name = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).get_inputs()[0].name
        inputs = {name: {"shape": ["n", 64, 21]}}
        return name, onnx_file.capture(
            project_for_model(file.name, folder=file.parent, inputs=inputs, axes={"n": {"min": 1, "opt": 1, "max": 16}})
        )

    name, program = captured(zoo("pulsevad/data/pulsevad_teacher_81k.onnx"))
    rng = np.random.default_rng(0)
    data = [{name: rng.standard_normal((8, 64, 21)).astype(np.float32)} for _ in range(5)]
    integer, report = onnx_ptq.quantize(program, quantization(), data[:4])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        integer.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    kernels = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    floats = Counter(n.op_type for n in program.model.graph.node)["Conv"]
    assert kernels["QLinearConv"] == floats and report.coverage > 0.95
    given = onnxruntime.InferenceSession(program.model.SerializeToString(), providers=["CPUExecutionProvider"])
    exact, found = given.run(None, data[4])[0], session.run(None, data[4])[0]
    assert 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum()) > 15
    assert captured(zoo("pulsevad/data/pulsevad_2.1k_int8.onnx"))[1].integer
