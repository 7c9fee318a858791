"""Models that come as files: ONNX, TorchScript, .pt2."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edgeopt.capture import capture
from edgeopt.errors import CaptureError, ModelError, ProjectError
from edgeopt.program import OnnxGraph, ScriptGraph
from edgeopt.progress import SILENT
from edgeopt.spec.project import project_for_model
from tests.capture.support import run

INPUTS = {"x": {"shape": ["N", 2]}}
AXES = {"N": {"min": 1, "opt": 2, "max": 4}}


def read(folder, name, inputs=None, axes=None):
    given = project_for_model(name, folder=folder, inputs=inputs or INPUTS, axes=AXES if axes is None else axes)
    return capture(given, progress=SILENT)


def onnx_model(rows="n", weight=((1, 2), (3, 4))) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 2])],
        [numpy_helper.from_array(np.array(weight, np.float32), "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_onnx_is_taken_as_it_is(tmp_path):
    onnx.save(onnx_model(), tmp_path / "m.onnx")
    program = read(tmp_path, "m.onnx")
    assert isinstance(program, OnnxGraph) and not program.integer
    assert program.model == onnx_model()
    assert program.signature.outputs[0].shape == ("N", 2)
    node = {"kind": "tensor", "index": 0}
    assert program.signature.output_structure == {"kind": "dict", "items": {"y": node}, "order": ["y"]}
    for call in program.reference:
        np.testing.assert_allclose(call.outputs["y"], call.inputs["x"] @ [[1, 2], [3, 4]], rtol=1e-6)


@pytest.mark.parametrize("content", [b"", b"not a protobuf", None], ids=["empty", "text", "cut"])
def test_a_corrupt_onnx_file_is_refused(tmp_path, content):
    whole = onnx_model().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(whole[:-20] if content is None else content)
    with pytest.raises(ModelError, match="not valid") as error:
        read(tmp_path, "m.onnx")
    assert "m.onnx" in error.value.where


def test_an_invalid_graph_is_refused(tmp_path):
    model = onnx_model()
    model.graph.node[0].op_type = "MatMull"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="MatMull"):
        read(tmp_path, "m.onnx")


def test_external_data_outside_the_folder_is_refused(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.bin").write_bytes(np.ones(4, np.float32).tobytes())
    model = onnx_model()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../secret.bin")
    (inside / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="not valid"):
        read(inside, "m.onnx")


def test_external_data_beside_the_file_is_read_in(tmp_path):
    onnx.save(onnx_model(), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    assert (tmp_path / "m.bin").exists()
    program = read(tmp_path, "m.onnx")
    (tmp_path / "m.bin").unlink()
    np.testing.assert_array_equal(numpy_helper.to_array(program.model.graph.initializer[0]), [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"X": {"shape": ["N", 2]}}, "none of the file's"),
        ({"x": {"shape": ["N", 3]}}, "where a number is fixed"),
        ({"x": {"shape": ["N"]}}, "where a number is fixed"),
        ({"x": {"shape": ["N", 2], "dtype": "float16"}}, "float32 in the file"),
        ({"x": {"shape": ["N", 2]}, "y2": {"shape": [1]}}, "'y2' is none"),
    ],
)
def test_inputs_that_are_not_the_files(tmp_path, inputs, says):
    onnx.save(onnx_model(), tmp_path / "m.onnx")
    with pytest.raises(ProjectError, match=says):
        read(tmp_path, "m.onnx", inputs)


def test_an_axis_that_the_file_fixes_is_named(tmp_path):
    onnx.save(onnx_model(rows=2), tmp_path / "m.onnx")
    with pytest.raises(ProjectError, match="where a number is fixed") as error:
        read(tmp_path, "m.onnx")
    assert "dynamic axes" in error.value.todo


class Two(nn.Module):
    def forward(self, x, scale: float = 2.0):
        return {"y": x * scale}


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def save(module, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(module, str(path))


def test_a_torchscript_file(tmp_path):
    save(scripted(Two()), tmp_path / "m.pt")
    program = read(tmp_path, "m.pt")
    assert isinstance(program, ScriptGraph) and program.how == "file"
    assert program.signature.output_names == ("y",)
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    np.testing.assert_array_equal(run(program, x=x)["y"], 2 * x)


def test_a_stateful_torchscript_file_is_refused(tmp_path):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += 1
            return x + self.seen

    save(scripted(Counter()), tmp_path / "m.pt")
    with pytest.raises(CaptureError, match="'seen'"):
        read(tmp_path, "m.pt")


def test_inputs_that_are_not_the_scripts(tmp_path):
    save(scripted(Two()), tmp_path / "m.pt")
    with pytest.raises(ProjectError, match="'xx' is no parameter") as error:
        read(tmp_path, "m.pt", {"xx": {"shape": ["N", 2]}})
    assert error.value.todo == "forward takes: x, scale"


@pytest.mark.parametrize("make", ["weights", "text", "cut"])
def test_a_pt_file_that_is_no_torchscript(tmp_path, make):
    save(scripted(Two()), tmp_path / "m.pt")
    whole = (tmp_path / "m.pt").read_bytes()
    if make == "weights":
        torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "m.pt")
    else:
        (tmp_path / "m.pt").write_bytes(b"text" if make == "text" else whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        read(tmp_path, "m.pt")
    assert "weights" in error.value.todo


def test_a_pt2_file_is_refused_with_the_reason(tmp_path):
    (tmp_path / "m.pt2").write_bytes(b"x")
    with pytest.raises(ModelError, match="pickled"):
        read(tmp_path, "m.pt2")
