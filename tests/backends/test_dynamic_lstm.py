"""LSTMs with int8 weights beside the integer file: real onnxruntime kernels, against the float model."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edgeopt.backends import dynamic_lstm
from edgeopt.backends import onnxruntime as backend
from edgeopt.capture import onnx_file
from edgeopt.errors import LoweringError
from edgeopt.program import Call
from edgeopt.quant import convert, recurrent
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import project_for_model
from tests.quant.programs import batches, outputs, program, quantization, sqnr_db


class Recurrent(nn.Module):
    """A convolution that becomes integers, a recurrent layer over its steps, a head."""

    def __init__(self, kind: type, width: int, **settings):
        super().__init__()
        self.conv = nn.Conv1d(4, 12, 3, padding=1)
        self.rnn = kind(12, width, batch_first=True, **settings)
        self.head = nn.Linear(width * (2 if settings.get("bidirectional") else 1), 3)

    def forward(self, x):
        steps, _ = self.rnn(torch.relu(self.conv(x)).transpose(1, 2))
        return self.head(steps.mean(1))


def lowered(model: nn.Module, out, *, profile: str = "x86-cpu", **settings):
    """(float program, integer program, report, what the backend wrote)."""
    torch.manual_seed(0)
    given = program(model, 4, 10)
    x = batches(4, 10, seed=3)[0]["x"]
    integer, report = convert.from_batches(given, quantization(), batches(4, 10))
    integer = integer.after("test", reference=(Call({"x": x}, {"y": outputs(given, x)}),))
    chosen = load_profile(profile, {f"quantization.{k}": v for k, v in settings.items()})
    return given, integer, report, backend.lower(integer, chosen, out)


# torch.export of an LSTM, whose weights are attributes that it did not register
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")


@pytest.mark.parametrize("settings", [{}, {"bidirectional": True}, {"num_layers": 2}], ids=str)
def test_an_lstm_is_offered_with_int8_weights_and_agrees_with_float(settings, tmp_path):
    given, _, _, written = lowered(Recurrent(nn.LSTM, 32, **settings), tmp_path)
    assert [c.name for c in written.candidates] == ["onnxruntime-int8", "onnxruntime-int8-dynamic"]
    plain, dynamic = (tmp_path / c.file for c in written.candidates)
    kinds = Counter(n.op_type for n in onnx.load(dynamic).graph.node)
    around = Counter(n.op_type for n in onnx.load(plain).graph.node)
    for kind in ("Conv", "Gemm", "QuantizeLinear", "DequantizeLinear"):  # what is around it stays as it is
        assert kinds[kind] == around[kind]
    assert kinds["DynamicQuantizeLSTM"] == settings.get("num_layers", 1) and not kinds["LSTM"]
    assert dynamic.stat().st_size < plain.stat().st_size
    x = batches(4, 10, seed=8)[0]["x"]
    session = onnxruntime.InferenceSession(str(dynamic), providers=["CPUExecutionProvider"])
    assert sqnr_db(outputs(given, x), session.run(None, {"x": x})[0]) > 20


def test_its_weights_have_seven_bits_where_the_target_needs_that(tmp_path):
    _, _, _, written = lowered(Recurrent(nn.LSTM, 32), tmp_path)
    for node in onnx.load(tmp_path / written.candidates[1].file).graph.node:
        if node.op_type == "DynamicQuantizeLSTM":
            held = {
                t.name: onnx.numpy_helper.to_array(t)
                for t in onnx.load(tmp_path / "int8_dynamic.onnx").graph.initializer
            }
            assert all(np.abs(held[name].astype(int)).max() <= 64 for name in (node.input[1], node.input[2]))
            return
    pytest.fail("no DynamicQuantizeLSTM")


class Alone(nn.Module):
    """Nothing but an LSTM: no pairs anywhere."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 16, batch_first=True)

    def forward(self, x):
        return self.rnn(x.transpose(1, 2))[0].mean(1)


def test_its_file_given_as_a_model_is_recognised_as_quantized(tmp_path):
    lowered(Alone(), tmp_path)
    inputs = {"x": {"shape": ["batch", 4, 10]}}
    project = project_for_model(
        dynamic_lstm.FILE_NAME, folder=tmp_path, inputs=inputs, axes={"batch": {"min": 1, "opt": 2, "max": 64}}
    )
    assert onnx_file.capture(project).integer


def test_the_file_is_the_same_when_written_again(tmp_path):
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lowered(Recurrent(nn.LSTM, 16), tmp_path / name)
        files.append((tmp_path / name / dynamic_lstm.FILE_NAME).read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_there_is_no_kernel_for_others_and_the_report_says_so(kind, tmp_path):
    given, _, report, written = lowered(Recurrent(kind, 16), tmp_path)
    assert [c.name for c in written.candidates] == ["onnxruntime-int8"]
    said = recurrent.reported(report, given, dynamic=True)
    assert said.left_float["model.rnn"] == f"{kind.__name__}: no runtime here has an integer kernel for it"
    assert said.counts["recurrent"] == {"quantized": 0, "float": 1}
    # 2 x 10 steps through its matrices, against the convolution (4 x 3 weights to 12 channels) and the head
    gates = {nn.GRU: 3, nn.RNN: 1}[kind]
    around, inside = 2 * 10 * 12 * 12 + 2 * 16 * 3, 2 * 10 * gates * 16 * (12 + 16)
    assert report.coverage == 1 and said.coverage == pytest.approx(around / (around + inside))


def test_the_profile_may_switch_it_off(tmp_path):
    given, _, report, written = lowered(Recurrent(nn.LSTM, 16), tmp_path, dynamic="off")
    assert [c.name for c in written.candidates] == ["onnxruntime-int8"]
    assert "quantization.dynamic" in recurrent.reported(report, given, dynamic=False).left_float["model.rnn"]


def test_a_model_without_recurrent_layers_has_one_file(tmp_path):
    lowered(nn.Conv1d(4, 8, 3), tmp_path)
    assert not (tmp_path / dynamic_lstm.FILE_NAME).exists()


def test_a_file_that_moves_the_outputs_too_far_is_refused_and_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_lstm, "LEAST_SQNR_DB", 90.0)
    _, _, _, written = lowered(Recurrent(nn.LSTM, 16), tmp_path)
    assert [c.name for c in written.candidates] == ["onnxruntime-int8"]
    (refused,) = written.refused
    assert refused.candidate == "onnxruntime-int8-dynamic" and "move 'y' by more than 90 dB" in refused.reason
    assert not (tmp_path / dynamic_lstm.FILE_NAME).exists()


def test_what_the_quantizer_raises_is_a_refusal(tmp_path):
    (tmp_path / "int8.onnx").write_bytes(b"no model")
    with pytest.raises(LoweringError, match="onnxruntime cannot quantize the LSTM"):
        dynamic_lstm.write(SimpleNamespace(), tmp_path / "int8.onnx", per_channel=True, weight_bits=8)
    assert not (tmp_path / dynamic_lstm.FILE_NAME).exists()
