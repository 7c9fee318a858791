"""Where Q/DQ pairs go, and which integer kernels onnxruntime makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.errors import ProjectError
from edgeopt.quant import convert
from tests.quant import models
from tests.quant.programs import (
    batches,
    in_onnxruntime,
    kernels_of,
    names,
    outputs,
    program,
    quantization,
    sqnr_db,
)

QDQ = "quantized_decomposed"


def quantized(model: nn.Module, *sizes: int, placement: str = "onnxruntime-x86", **settings):
    p = program(model, *sizes)
    keep = settings.pop("keep_float", ())
    integer, report = convert.from_batches(p, quantization(placement, **settings), batches(*sizes), keep_float=keep)
    return p, integer, report


def pairs(p) -> dict[str, tuple]:
    """What each quantize op of an activation reads -> (scale, zero point, dtype)."""
    return {
        n.args[0].name: (n.args[1], n.args[2], n.args[5])
        for n in p.module.graph.nodes
        if n.op == "call_function" and n.target is torch.ops.quantized_decomposed.quantize_per_tensor.default
    }


def test_every_convolution_and_add_of_a_residual_net_becomes_an_integer_kernel(tmp_path):
    p, integer, report = quantized(models.Net(), 3, 16, 16)
    session, kernels = in_onnxruntime(integer, tmp_path)
    assert kernels["QLinearConv"] == 3
    assert kernels["QLinearAdd"] == 1
    assert kernels["QGemm"] == 1
    assert not kernels["Conv"] and not kernels["Add"] and not kernels["Relu"] and not kernels["Gemm"]
    assert report.counts["convolution"] == {"quantized": 3, "float": 0}
    assert report.coverage == 1.0 and not report.left_float
    for size in (1, 5):
        x = batches(3, 16, 16, count=1, size=size, seed=size)[0]["x"]
        got = session.run(None, {"x": x})[0]
        assert sqnr_db(outputs(p, x), got) > 25
        assert sqnr_db(outputs(integer, x), got) > 35


def test_a_relu_module_that_is_called_twice_is_quantized_twice():
    """Q12: stock quantizers fail with 'Input partition has more than one output node'."""
    _, integer, report = quantized(models.Residual(), 8, 8, 8)
    assert report.counts == {
        "convolution": {"quantized": 2, "float": 0}, "add": {"quantized": 1, "float": 0},
    }  # fmt: skip
    assert sorted(pairs(integer)) == ["conv2d_1", "relu", "relu_1", "x"]


def test_a_residual_of_the_input_itself_shares_its_quantization():
    """Q06: x + conv(x) calibrates and converts; the input is quantized once, for both."""

    class Plus(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            return x + self.conv(x)

    p, integer, _ = quantized(Plus(), 4, 8, 8)
    assert sorted(pairs(integer)) == ["add", "conv2d", "x"]
    x = batches(4, 8, 8, seed=9)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 30


def test_tensorrt_pairs_stand_before_convolutions_and_the_residual_operand_only():
    _, integer, report = quantized(models.Net(), 3, 16, 16, placement="tensorrt")
    # relu feeds both the first convolution of the block and the add: one pair. The add's other operand, the second
    # convolution, has none, nor has any output: TensorRT fuses conv + add + relu.
    assert sorted(pairs(integer)) == ["flatten", "relu", "relu_1", "x"]
    q, dq = "quantize_per_tensor", "dequantize_per_tensor"
    flow = [n for n in names(integer) if n != "dequantize_per_channel"]
    assert flow == [
        q, dq, "conv2d", "relu", q, dq, dq, "conv2d", "relu", q, dq, "conv2d", "add", "relu",
        "adaptive_avg_pool2d", "flatten", q, dq, "linear",
    ]  # fmt: skip
    assert report.counts["add"] == {"quantized": 1, "float": 0}


@pytest.mark.parametrize("model", [models.Net, lambda: models.Residual(3), models.Branches])
def test_tensorrt_zero_points_are_all_zero_and_biases_stay_float(model):
    _, integer, _ = quantized(model(), 3, 8, 8, placement="tensorrt")
    assert {(zero, dtype) for _, zero, dtype in pairs(integer).values()} == {(0, torch.int8)}
    state = integer.module.state_dict()
    assert all(bool((v == 0).all()) for k, v in state.items() if "zero_point" in k)
    assert not any(v.dtype == torch.int32 for v in state.values())


def test_a_downsampling_block_in_tensorrt_quantizes_one_operand_of_its_add():
    class Down(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.shortcut = nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(4, 8, 1, 2)

        def forward(self, x):
            return self.main(x) + self.shortcut(x)

    _, integer, _ = quantized(Down(), 4, 8, 8, placement="tensorrt")
    assert sorted(pairs(integer)) == ["conv2d_1", "x"]


def test_operands_of_a_concat_far_apart_keep_their_scales(tmp_path):
    """Fifty times as wide: sharing one scale would leave the small one 5 of its 255 steps."""
    p, integer, _ = quantized(models.Branches(), 3, 8, 8)
    found = pairs(integer)
    assert found["conv2d_1"][0] > 20 * found["conv2d"][0] and found["cat"] == found["conv2d_1"]
    kernels = kernels_of(integer, tmp_path)
    assert kernels.integer["QLinearConv"] == 3 and kernels.integer["QLinearConcat"] == 1 and not kernels.floats


@pytest.mark.parametrize("times, shared", [(1.0, True), (0.95, True), (0.6, False)])
def test_operands_of_a_concat_near_each_other_share_one_scale(times, shared):
    class Near(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)
            with torch.no_grad():
                self.second.weight.copy_(self.first.weight * times)
                self.second.bias.copy_(self.first.bias * times)

        def forward(self, x):
            return self.last(torch.cat([self.first(x), self.second(x)], 1))

    p, integer, _ = quantized(Near(), 3, 8, 8)
    found = pairs(integer)
    assert (found["conv2d_1"] == found["cat"]) == shared
    x = batches(3, 8, 8, seed=2)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 30


def test_an_operand_of_a_concat_that_an_integer_bias_was_made_for_keeps_its_scale():
    """Another reader's int32 bias is stored at the operand's scale."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.side, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 2, 1)
            with torch.no_grad():
                self.side.weight.copy_(1.05 * torch.eye(4).reshape(4, 4, 1, 1))

        def forward(self, x):
            x = self.first(x)
            return self.last(torch.cat([x, self.side(x)], 1))

    _, integer, _ = quantized(Skip(), 3, 8, 8)
    found = pairs(integer)
    assert 0.85 < found["conv2d"][0] / found["cat"][0] < 1  # near, and yet left alone


def test_a_mean_over_a_picture_of_varying_size_stays_float_and_says_so():
    class Varying(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.head(self.conv(x).mean((2, 3), keepdim=True))

    p = program(Varying(), 3, 9, 9, varying=2)
    _, report = convert.from_batches(p, quantization(), batches(3, 9, 9))
    assert report.counts["mean"] == {"quantized": 0, "float": 1}
    assert report.counts["convolution"] == {"quantized": 2, "float": 0}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_take_their_channels_from_axis_1(dims, groups):
    sizes = (4, *([6] * dims))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    model = kind(4, 6, 2, stride=2, groups=groups)
    with torch.no_grad():  # channels of very different range, which one scale an input channel would lose
        model.weight.mul_(torch.logspace(0, -3, 6 // groups).reshape(1, -1, *([1] * dims)))
    p, integer, report = quantized(model, *sizes, placement="tensorrt")
    axes = [
        n.args[3]
        for n in integer.module.graph.nodes
        if n.op == "call_function" and n.target is torch.ops.quantized_decomposed.dequantize_per_channel.default
    ]
    assert axes == [1]
    x = batches(*sizes, seed=5)[0]["x"]
    for channel in range(6):
        assert sqnr_db(outputs(p, x)[:, channel], outputs(integer, x)[:, channel]) > 25


def test_onnxruntime_has_no_integer_transposed_convolution_so_it_stays_float():
    _, integer, report = quantized(nn.ConvTranspose2d(4, 4, 2), 4, 8, 8)
    assert not pairs(integer)
    assert list(report.left_float.values()) == ["the runtime has no integer kernel for it"]
    assert report.coverage == 0.0


@pytest.mark.parametrize("placement", ["onnxruntime-x86", "onnxruntime-arm", "tensorrt"])
def test_tied_weights_are_quantized_alike_at_both_uses(placement):
    p, integer, report = quantized(models.Tied(), 4, 8, 8, placement=placement)
    weights = [v for v in integer.module.state_dict().values() if v.dtype == torch.int8]
    assert report.counts["convolution"]["quantized"] == 2
    assert all(torch.equal(w, weights[0]) for w in weights)
    x = batches(4, 8, 8, seed=3)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU()])
def test_smooth_activations_stay_whole_between_integer_convolutions(activation, tmp_path):
    """Q03: x, sigmoid and product each quantized leave 7 values for x < 0; one float unit costs at most a step."""
    p, integer, _ = quantized(models.Gated(activation), 3, 8, 8)
    found = pairs(integer)
    assert len(found) == 4  # input, first convolution, activation, second convolution
    _, kernels = in_onnxruntime(integer, tmp_path)
    assert kernels["QLinearConv"] == 2
    assert not kernels["QLinearMul"] and not kernels["QLinearSigmoid"]


def test_a_silu_costs_at_most_one_step_of_its_output():
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 1, 1, bias=False)
            nn.init.ones_(self.first.weight)
            nn.init.ones_(self.second.weight)

        def forward(self, x):
            return self.second(nn.functional.silu(self.first(x)))

    p = program(Bounded(), 1, 1, 241)
    x = np.linspace(-12, 12, 241, dtype=np.float32).reshape(1, 1, 1, 241)
    integer, _ = convert.from_batches(p, quantization(weight_bits=8), [{"x": x}])
    silu_step = pairs(integer)["silu"][0]
    input_step = pairs(integer)["conv2d"][0]
    error = np.abs(outputs(p, x) - outputs(integer, x))
    assert error.max() <= 1.1 * input_step + 1.5 * silu_step  # its input's rounding, and its own
    negative = np.unique(outputs(integer, x)[x < 0])
    assert len(negative) <= 7 and error[x < 0].max() < input_step


def test_attention_quantizes_linear_layers_and_leaves_products_softmax_and_norm_float(tmp_path):
    """Products of two activations are slower on integers than in float (see rules_products)."""
    p, integer, report = quantized(models.Attention(), 6, 16)
    assert report.counts["linear"] == {"quantized": 4, "float": 0}
    assert report.counts["matmul"] == {"quantized": 0, "float": 2}
    assert report.counts["add"] == {"quantized": 0, "float": 1}
    x = batches(6, 16, seed=4)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 20
    session, kernels = in_onnxruntime(integer, tmp_path)
    assert sqnr_db(outputs(integer, x), session.run(None, {"x": x})[0]) > 30
    assert kernels["MatMulIntegerToFloat"] == 4
    assert kernels["SkipLayerNormalization"] == 1 and kernels["Softmax"] == 1  # residual add and norm, in float


def test_tensorrt_takes_both_operands_of_attention_written_by_hand_as_integers():
    _, _, report = quantized(models.Attention(), 6, 16, placement="tensorrt")
    assert report.counts["matmul"] == {"quantized": 2, "float": 0}


def test_integer_inputs_are_left_alone_and_a_table_has_a_scale_a_row():
    p = program(models.Tokens(), 7, dtype="int64", values=(0, 19))
    data = [{"x": np.random.default_rng(0).integers(0, 20, (8, 7))}]
    integer, report = convert.from_batches(p, quantization(), data)
    assert "x" not in pairs(integer)
    assert report.counts["linear"]["quantized"] == 1
    state = integer.module.state_dict()
    assert state["model.embed.weight"].dtype == torch.int8 and state["model.embed.weight"].abs().max() >= 127
    assert state["model.embed.weight_scale"].shape == (20,)


def test_the_row_of_zeros_that_pads_a_table_is_no_dead_channel():
    model = models.Tokens()
    with torch.no_grad():
        model.embed.weight[0] = 0
    p = program(model, 7, dtype="int64", values=(0, 19))
    _, report = convert.from_batches(p, quantization(), [{"x": np.arange(14).reshape(2, 7)}])
    assert not any("all zero" in line for line in report.warnings)


@pytest.mark.parametrize("pattern, left", [("model.block", 2), ("model.block.first", 1), ("conv2d", 3), ("*.stem", 1)])
def test_keep_float_takes_module_paths_and_operators(pattern, left):
    _, integer, report = quantized(models.Net(), 3, 16, 16, keep_float=(pattern,))
    assert report.counts["convolution"] == {"quantized": 3 - left, "float": left}
    assert set(report.left_float.values()) == {"kept float by the project"}


@pytest.mark.parametrize(
    "pattern, written", [("mean", "avg_pool2d"), ("avg_pool2d", "avg_pool2d"), ("max_pool2d", "max_pool2d")]
)
def test_keep_float_takes_the_operators_of_the_users_model_whatever_they_are_written_as(pattern, written):
    """The mean over a picture is written as average pooling, and is a mean to the user still."""
    _, _, report = quantized(models.Pooled(), 3, 8, 8, keep_float=(pattern,))
    kept = [d for d in report.layers if d.operator == written and d.reason == "kept float by the project"]
    assert len(kept) == 1


def test_a_batch_norm_that_is_kept_float_is_not_folded():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    _, integer, report = quantized(net, 3, 8, 8, keep_float=("model.1",))
    assert report.batch_norms_folded == 0 and any("batch_norm" in str(n.target) for n in integer.module.graph.nodes)


def test_keep_float_that_names_nothing_is_refused():
    with pytest.raises(ProjectError, match="'model.blok' matches no module path"):
        quantized(models.Net(), 3, 16, 16, keep_float=("model.blok",))


def test_the_program_that_is_quantized_stays_as_it_was():
    p = program(models.Net(), 3, 16, 16)
    before = {k: v.clone() for k, v in p.module.state_dict().items()}
    nodes = [n.name for n in p.module.graph.nodes]
    convert.from_batches(p, quantization(), batches(3, 16, 16))
    assert [n.name for n in p.module.graph.nodes] == nodes
    assert all(torch.equal(before[k], v) for k, v in p.module.state_dict().items())


@pytest.mark.parametrize("kind, sizes", [(nn.Conv1d, (4, 12)), (nn.Conv2d, (4, 6, 6)), (nn.Conv3d, (4, 5, 5, 5))])
def test_convolutions_of_every_dimension_are_integer_in_onnxruntime(kind, sizes, tmp_path):
    p, integer, _ = quantized(nn.Sequential(kind(4, 8, 3), nn.ReLU6(), kind(8, 8, 1, groups=8)), *sizes)
    session, kernels = in_onnxruntime(integer, tmp_path)
    assert kernels["QLinearConv"] == 2 and not kernels["Conv"] and not kernels["Clip"]
    x = batches(*sizes, seed=1)[0]["x"]
    assert sqnr_db(outputs(p, x), session.run(None, {"x": x})[0]) > 25
