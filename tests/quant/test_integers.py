"""The converted graph: integers under the model's own names, tied weights once, metadata on every node."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from edgeopt.backends import onnx_export
from edgeopt.program.qdq import is_dequantize, is_quantize
from edgeopt.quant import convert, finetune
from edgeopt.quant.prepare import prepare
from edgeopt.spec.project import Qat
from tests.quant import models
from tests.quant.programs import batches, outputs, program, quantization, sqnr_db


def quantized(model: nn.Module, *sizes: int, placement: str = "onnxruntime-x86", **settings):
    p = program(model, *sizes)
    return p, convert.from_batches(p, quantization(placement, **settings), batches(*sizes))[0]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("placement", ["onnxruntime-x86", "onnxruntime-arm", "tensorrt"])
def test_integers_stand_under_the_name_of_their_parameter(placement, per_channel):
    """`_frozen_param0` would hide which layer it belongs to."""
    _, integer = quantized(models.Net(), 3, 16, 16, placement=placement, per_channel=per_channel)
    state = integer.module.state_dict()
    layers = ("stem", "block.first", "block.second", "head")
    assert {k for k, v in state.items() if v.dtype == torch.int8} == {f"model.{layer}.weight" for layer in layers}
    assert {f"model.{layer}.bias" for layer in layers} < set(state)
    extra = {k for k in state if k.rpartition(".")[2] not in ("weight", "bias")}
    assert all(k.endswith(("_scale", "_zero_point")) for k in extra) and bool(extra) == per_channel


@pytest.mark.parametrize("opset", [13, 18])
def test_the_names_reach_the_onnx_file(opset, tmp_path):
    _, integer = quantized(models.Net(), 3, 16, 16)
    file = onnx_export.write(integer, tmp_path, opset_max=opset)
    held = {t.name for t in onnx.load(tmp_path / file.name).graph.initializer if t.data_type == onnx.TensorProto.INT8}
    assert {"model.stem.weight", "model.block.first.weight", "model.head.weight"} <= held


def test_a_weight_that_floats_read_too_keeps_its_name_and_the_integers_get_the_next():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1, bias=False)

        def forward(self, x):
            return self.conv(x) * self.conv.weight.abs().sum()

    p, integer = quantized(Both(), 3, 4, 4)
    state = integer.module.state_dict()
    assert state["model.conv.weight"].dtype == torch.float32
    assert state["model.conv.weight_1"].dtype == torch.int8
    x = batches(3, 4, 4, seed=5)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 30


class TwoNames(nn.Module):
    """One tensor as the weight of two modules."""

    def __init__(self, kind: str):
        super().__init__()
        make = {"conv": lambda: nn.Conv2d(4, 4, 3, padding=1), "linear": lambda: nn.Linear(4, 4)}[kind]
        self.first, self.second = make(), make()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("kind, sizes", [("conv", (4, 6, 6)), ("linear", (4,))])
def test_tied_weights_are_stored_once(kind, sizes):
    p, integer = quantized(TwoNames(kind), *sizes)
    assert sum(v.dtype == torch.int8 for v in integer.module.state_dict().values()) == 1
    x = batches(*sizes, seed=5)[0]["x"]
    assert sqnr_db(outputs(p, x), outputs(integer, x)) > 25


@pytest.mark.parametrize("placement", ["onnxruntime-x86", "tensorrt"])
@pytest.mark.parametrize(
    "model, sizes", [(models.Net, (3, 16, 16)), (models.Attention, (6, 16)), (models.Branches, (3, 8, 8))]
)
def test_every_node_says_what_it_gives(model, sizes, placement):
    """Later passes and lowering read the shape and dtype of quantize and dequantize as of any other operator."""
    p, integer = quantized(model(), *sizes, placement=placement)
    for node in integer.module.graph.nodes:
        if node.op == "output":
            continue
        value = node.meta["val"]
        if is_quantize(node):
            assert value.dtype == node.args[-1] and value.shape == node.args[0].meta["val"].shape
        if is_dequantize(node):
            assert value.dtype == torch.float32 and value.shape == node.args[0].meta["val"].shape
    batch = {
        str(n.meta["val"].shape[0]) for n in integer.module.graph.nodes if n.op == "call_function" and is_quantize(n)
    }
    assert not any(size.isdigit() for size in batch)  # the batch is dynamic still


def test_the_file_is_about_a_quarter_of_the_float_one(tmp_path):
    p, integer = quantized(nn.Sequential(nn.Conv2d(16, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3)), 16, 8, 8)
    sizes = []
    for given in (p, integer):
        file = onnx_export.write(given, tmp_path, opset_max=18)
        sizes.append((tmp_path / file.name).stat().st_size)
    assert sizes[1] < 0.27 * sizes[0]


@pytest.mark.parametrize("kind, sizes", [("conv", (4, 6, 6)), ("linear", (4,))])
def test_training_keeps_tied_weights_tied(kind, sizes):
    p = program(TwoNames(kind), *sizes)
    data = [(batch, torch.zeros(8, 4)) for batch in batches(*sizes)]

    def loss(outputs, target):
        return (outputs.flatten(2).mean(2) if outputs.ndim > 2 else outputs).square().mean()

    prepared = prepare(p, quantization(), qat=True)
    training = finetune.train(prepared, lambda: data, loss, Qat(epochs=1, learning_rate=1e-2), seed=0)
    integer, _ = convert.from_state(p, quantization(), training.state)
    assert sum(v.dtype == torch.int8 for v in integer.module.state_dict().values()) == 1
