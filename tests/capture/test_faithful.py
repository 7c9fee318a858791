"""Capture is right or refused: sizes, values, state, randomness, written inputs (cases C01 to C07, C10, O01 to O03)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeopt.capture import capture
from edgeopt.errors import CaptureError, ModelError
from edgeopt.program import ExportedGraph, ScriptGraph
from edgeopt.progress import SILENT
from tests.capture.support import captured, project, run

ROW = {"x": {"shape": ["N", 3]}}
BATCH = {"N": {"min": 1, "opt": 1, "max": 8}}


def test_a_loop_over_the_length_is_equal_at_other_lengths(tmp_path):
    code = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.LSTMCell(4, 3)

        def forward(self, x):
            h = torch.zeros(x.shape[1], 3)
            c = h
            out = []
            for i in range(x.shape[0]):
                h, c = self.cell(x[i], (h, c))
                out.append(h)
            return torch.stack(out)
    """
    axes = {"T": {"min": 1, "opt": 5, "max": 9}, "B": {"min": 1, "opt": 2, "max": 4}}
    program = captured(tmp_path, code, {"x": {"shape": ["T", "B", 4]}}, axes)
    x = np.random.default_rng(0).normal(size=(8, 2, 4)).astype(np.float32)
    torch.manual_seed(0)
    cell, h, c = torch.nn.LSTMCell(4, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    want = []
    with torch.no_grad():
        for step in torch.from_numpy(x):
            h, c = cell(step, (h, c))
            want.append(h.numpy())
    np.testing.assert_allclose(run(program, x=x)["output"], want, atol=1e-6)
    assert isinstance(program, ScriptGraph) and program.how == "script"
    assert program.signature.outputs[0].shape == ("T", "B", 3)
    assert any("torch.export" in note and "T" in note for note in program.notes)


def test_assignment_to_a_slice_follows_the_length(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x, n):
            x = x.clone()
            x[:, :, 1] = (torch.arange(x.shape[1]) < n).float()
            return x
    """
    inputs = {"x": {"shape": [1, "T", 3]}, "n": {"shape": [1], "dtype": "int64", "values": [0, 5]}}
    program = captured(tmp_path, code, inputs, {"T": {"min": 1, "opt": 2, "max": 9}})
    got = run(program, x=np.full((1, 5, 3), 7, np.float32), n=np.array([3]))["output"]
    np.testing.assert_array_equal(got[0, :, 1], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(got[0, :, 0], [7] * 5)


@pytest.mark.parametrize(
    "state",
    ["self.register_buffer('a', torch.zeros(1))", "self.a = torch.zeros(1)"],
    ids=["buffer", "plain attribute"],
)
def test_state_between_calls_is_refused(tmp_path, state):
    code = f"""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            {state}

        def forward(self, x):
            a = self.a + x
            self.a = a * a
            return 2 * a
    """
    with pytest.raises(CaptureError, match="state|equal inputs") as error:
        captured(tmp_path, code, {"x": {"shape": [1]}})
    assert "state" in error.value.todo


def test_neither_the_users_module_nor_their_data_changes(tmp_path):
    code = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(3, 3, 1)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            x += 1
            return self.norm(self.conv(x)) * 2

    held = Net().train()
    batch = torch.zeros(2, 3, 5)

    def Model():
        return held

    def batches():
        return [{"x": batch}]
    """
    given = project(tmp_path, code, {"x": {"shape": ["N", 3, 5]}}, BATCH, calibration="model.py:batches")
    from edgeopt.ports.user_code import load_attribute

    net, batch = (load_attribute(f"model.py:{n}", tmp_path, key="t") for n in ("held", "batch"))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    program = capture(given, progress=SILENT)
    assert net.training and net.norm.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(batch, torch.zeros(2, 3, 5))
    x = np.zeros((4, 3, 5), np.float32)
    first, second = run(program, x=x)["output"], run(program, x=x)["output"]
    np.testing.assert_array_equal(first, second)
    assert not x.any()


@pytest.mark.parametrize("weights", [1, 2])
def test_a_loop_that_depends_on_data_is_right(tmp_path, weights):
    code = f"""
    class Model(nn.Module):
        def forward(self, x):
            n = int(x.sum())
            for _ in range(n):
                x = x + {weights}
            return x
    """
    program = captured(tmp_path, code, {"x": {"shape": [1], "values": [0.0, 6.0]}})
    assert run(program, x=np.array([5.0], np.float32))["output"] == 5 + 5 * weights
    assert run(program, x=np.array([2.0], np.float32))["output"] == 2 + 2 * weights


def test_what_no_way_captures_is_refused_with_the_users_line(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x):
            table = {float(v): v for v in x}
            return x + len(table) if x.numpy().max() > 0.5 else x - len(table)
    """
    with pytest.raises(CaptureError) as error:
        captured(tmp_path, code, {"x": {"shape": [4]}})
    for way in ("torch.export", "torch.jit.trace", "torch.jit.script"):
        assert way in error.value.what
    assert "model.py, line" in error.value.where


def test_a_module_in_train_mode_is_captured_in_eval_mode(tmp_path):
    code = """
    class Model(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
            self.train()
    """
    program = captured(tmp_path, code, {"input": {"shape": ["N", 3]}}, BATCH)
    x = np.ones((2, 3), np.float32)
    assert len({run(program, input=x)["output"].tobytes() for _ in range(20)}) == 1


@pytest.mark.parametrize(
    "call",
    ["F.dropout(x, 0.5)", "F.dropout1d(x[None])[0]", "x + torch.randn_like(x)", "torch.bernoulli(x)",
     "torch.rand(3) + x", "F.alpha_dropout(x, 0.5, training=True)"],
)  # fmt: skip
def test_random_numbers_in_eval_mode_are_refused_with_the_line(tmp_path, call):
    code = f"""
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            return {call}
    """
    with pytest.raises(CaptureError, match="random") as error:
        captured(tmp_path, code, {"x": {"shape": [32, 3]}})
    assert error.value.where.startswith("model.py, line 9")


@pytest.mark.parametrize("axis", [{"min": 1, "opt": 1, "max": 8}, {"min": 1, "opt": 1, "max": 2}])
def test_a_batch_tuned_for_one_stays_dynamic(tmp_path, axis):
    code = """
    class Model(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
    """
    program = captured(tmp_path, code, {"input": {"shape": ["N", 2]}}, {"N": axis})
    assert isinstance(program, ExportedGraph)
    node = next(n for n in program.module.graph.nodes if n.op == "placeholder")
    assert node.meta["val"].shape[0].node.expr.free_symbols
    assert run(program, input=np.zeros((axis["max"], 2), np.float32))["output"].shape == (axis["max"], 2)


def test_inputs_go_by_name_and_defaults_stay(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, a, b=None, c=None):
            out = a
            if b is not None:
                out = out + 10 * b
            if c is not None:
                out = out + 100 * c
            return out
    """
    program = captured(tmp_path, code, {"c": {"shape": [1]}, "a": {"shape": [1]}})
    assert program.signature.input_names == ("c", "a")
    assert run(program, a=np.ones(1, np.float32), c=np.ones(1, np.float32))["output"] == 101


def test_an_unused_input_stays(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x, unused):
            return x * 2
    """
    program = captured(tmp_path, code, {"x": {"shape": ["N", 3]}, "unused": {"shape": ["N", 3]}}, BATCH)
    assert program.signature.input_names == ("x", "unused")
    assert len([n for n in program.module.graph.nodes if n.op == "placeholder"]) == 2
    x = np.ones((5, 3), np.float32)
    np.testing.assert_array_equal(run(program, x=x, unused=x)["output"], 2 * x)


def test_sizes_read_from_data_stay_dynamic(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x):
            return x.reshape(x.data.size(0), -1)
    """
    program = captured(tmp_path, code, {"x": {"shape": ["N", 3, 4]}}, BATCH)
    assert run(program, x=np.zeros((5, 3, 4), np.float32))["output"].shape == (5, 12)


def test_a_mask_assignment_works_for_every_sign(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, R):
            r = torch.zeros(R.shape[0], 2)
            mask = R > 0
            r[mask, 0] = R[mask]
            return r
    """
    program = captured(tmp_path, code, {"R": {"shape": ["N"]}}, {"N": {"min": 1, "opt": 4, "max": 9}})
    got = run(program, R=np.array([-1, 2, -3, 4], np.float32))["output"]
    np.testing.assert_array_equal(got[:, 0], [0, 2, 0, 4])


def test_a_model_for_multiples_of_a_size_is_captured_at_them(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x):
            return F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0) + x
    """
    axes = {name: {"min": 8, "opt": 16, "max": 64} for name in ("H", "W")}
    program = captured(tmp_path, code, {"x": {"shape": [1, 2, "H", "W"]}}, axes)
    assert run(program, x=np.zeros((1, 2, 64, 8), np.float32))["output"].shape == (1, 2, 64, 8)
    assert program.signature.outputs[0].shape == (1, 2, "H", "W")


def test_a_declared_size_at_which_the_model_fails_is_named(tmp_path):
    code = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return x + self.positions[torch.arange(x.shape[0])]
    """
    with pytest.raises(ModelError, match="T=8") as error:
        captured(tmp_path, code, {"x": {"shape": ["T"]}}, {"T": {"min": 1, "opt": 2, "max": 8}})
    assert error.value.where == "model.py, line 12"
    assert "axes.T" in error.value.todo


def test_a_model_that_fails_names_its_line_and_the_shapes(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x):
            return x @ torch.zeros(4, 4)
    """
    with pytest.raises(ModelError, match=r"x \[2, 3\] float32") as error:
        captured(tmp_path, code, ROW, BATCH)
    assert error.value.where == "model.py, line 8"


def test_an_output_size_that_is_no_axis_has_a_name_of_its_own(tmp_path):
    code = """
    class Model(nn.Module):
        def forward(self, x):
            return torch.cat([x, x]), x
    """
    program = captured(tmp_path, code, ROW, BATCH)
    assert [spec.shape for spec in program.signature.outputs] == [("dim_0", 3), ("N", 3)]


def test_an_attention_encoder_is_captured_with_operators_that_others_know(tmp_path):
    code = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(50, 16)
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids, padding):
            return self.encoder(self.words(ids), src_key_padding_mask=padding)
    """
    inputs = {
        "ids": {"shape": ["N", "T"], "dtype": "int64", "values": [0, 49]},
        "padding": {"shape": ["N", "T"], "dtype": "bool"},
    }
    axes = {"N": {"min": 1, "opt": 1, "max": 4}, "T": {"min": 1, "opt": 7, "max": 20}}
    program = captured(tmp_path, code, inputs, axes)
    assert isinstance(program, ExportedGraph)
    assert not any("_transformer_encoder" in str(n.target) for n in program.module.graph.nodes)
    assert torch.backends.mha.get_fastpath_enabled()
    padding = np.zeros((3, 11), bool)
    padding[:, 8:] = True
    ids = np.arange(33).reshape(3, 11) % 50
    changed = np.where(padding, 7, ids)  # what is masked must not matter
    a, b = (run(program, ids=i, padding=padding)["output"][:, :8] for i in (ids, changed))
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    "norm", ["nn.utils.weight_norm", "nn.utils.parametrizations.weight_norm", "nn.utils.spectral_norm"]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_are_computed_at_each_call(tmp_path, norm):
    code = f"""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = {norm}(nn.Conv1d(3, 4, 3))

        def forward(self, x):
            return self.conv(x)
    """
    program = captured(tmp_path, code, {"x": {"shape": ["N", 3, 8]}}, BATCH)
    assert isinstance(program, ExportedGraph)
    for call in program.reference:
        np.testing.assert_allclose(run(program, **call.inputs)["output"], call.outputs["output"], atol=1e-6)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_follow_the_length(tmp_path, cell):
    code = f"""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.{cell}(4, 5, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.cell(x)[0]
    """
    axes = {"N": {"min": 1, "opt": 1, "max": 4}, "T": {"min": 1, "opt": 5, "max": 20}}
    program = captured(tmp_path, code, {"x": {"shape": ["N", "T", 4]}}, axes)
    torch.manual_seed(0)
    layer = getattr(torch.nn, cell)(4, 5, batch_first=True, bidirectional=True)
    x = np.random.default_rng(0).normal(size=(3, 17, 4)).astype(np.float32)
    with torch.no_grad():
        want = layer(torch.from_numpy(x))[0].numpy()
    np.testing.assert_allclose(run(program, x=x)["output"], want, atol=1e-5)


def test_the_notes_say_how_it_was_captured(tmp_path):
    program = captured(tmp_path, "class Model(nn.ReLU): pass", {"input": {"shape": ["N", 3]}}, BATCH)
    assert any("captured by torch.export" in note for note in program.notes)
    assert program.stages == ("capture",)
    assert [call.inputs["input"].shape for call in program.reference] == [(1, 3), (4, 3)]
