"""Foreign nodes that an autograd function or an ONNX file of the user's brings: kept, run, or told of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeopt import passes
from edgeopt.backends import custom_ops as onnx_ops
from edgeopt.backends import onnx_export, torchscript
from edgeopt.backends import onnxruntime as ort_backend
from edgeopt.capture import serialise
from edgeopt.errors import LoweringError, ModelError
from edgeopt.program import OnnxGraph, foreign, graph
from edgeopt.quant import convert
from edgeopt.spec.profile import load_profile
from tests.backends.custom_op_models import AXES, FUNCTION, HERE, INPUTS, PROFILES, answers, assert_equal
from tests.capture.support import captured
from tests.native import ort_library


@pytest.mark.parametrize("opset", [20, 13])
def test_the_node_of_an_autograd_function_is_kept_where_the_project_maps_it(tmp_path, opset):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    file = onnx_export.write(program, tmp_path, opset_max=opset)
    model = onnx.load(tmp_path / file.name)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Scale") == 2 and "Mul" not in kinds
    held = [helper.get_attribute_value(n.attribute[0]) for n in model.graph.node if n.op_type == "Scale"]
    assert held == [3.0, 0.5]
    assert_equal(program, tmp_path / file.name, ort_library())
    lowered = torchscript.lower(program, load_profile(PROFILES[HERE]), tmp_path)  # which has what it computes
    assert lowered.candidates


def test_the_kept_node_goes_through_the_passes_into_int8(tmp_path):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    profile = load_profile(PROFILES[HERE])
    optimized, records = passes.optimize(program, profile, {})
    assert not [record.name for record in records if record.status == "dropped"]
    batches = [graph.synthetic(program.signature, {"n": 8}, seed) for seed in range(4)]
    integer, _ = convert.from_batches(optimized, profile.quantization, batches, limit=4)
    file = onnx_export.write(integer, tmp_path, opset_max=17)  # run and compared there
    kinds = [node.op_type for node in onnx.load(tmp_path / file.name).graph.node]
    assert kinds.count("Scale") == 2 and "QuantizeLinear" in kinds and "Mul" not in kinds


def test_the_kept_node_is_read_from_the_cache_by_a_process_that_knows_nothing_of_it(tmp_path):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    serialise.save(program, tmp_path / "saved")
    code = "import sys; from pathlib import Path\n"
    code += "from edgeopt.capture import serialise; from edgeopt.program import graph\n"
    code += "program = serialise.load(Path(sys.argv[1])); call = program.reference[0]\n"
    code += "print(abs(graph.run(program, call.inputs)['output'] - call.outputs['output']).max())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "saved")], capture_output=True, text=True)
    assert done.returncode == 0 and float(done.stdout.splitlines()[-1]) < 1e-6, done.stderr[-1000:]


SEVERAL = """
class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y, x - y
    @staticmethod
    def symbolic(g, x, y):
        return g.op("acme::Split", x, y, outputs=2)

class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def symbolic(g, x):
        return g.op("Relu", g.op("acme::Split", x))

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def symbolic(g, x):
        raise ValueError("not for export")

class Model(nn.Module):
    def forward(self, x):
        first, second = Split.apply(x, x * 2)
        return Mixed.apply(first) + Fails.apply(second)
"""


def test_a_node_of_several_values_is_kept_and_one_that_cannot_be_is_told_of(tmp_path):
    program = captured(tmp_path, SEVERAL, INPUTS, AXES, custom_ops="{'acme::Split': {node: 'acme::Split'}}")
    kept = [node for node in program.module.graph.nodes if foreign.is_foreign(node)]
    assert len(kept) == 1 and [len(kept[0].args[0]), len(kept[0].args[1])] == [2, 2]
    notes = " ".join(program.notes)
    assert "Mixed is not kept: its symbolic writes ONNX's own Relu" in notes
    assert "Fails is not kept: its symbolic fails: ValueError: not for export" in notes
    path = tmp_path / "split.onnx"
    onnx_export.write_unproved(program, path, opset_max=18)
    (node,) = [n for n in onnx.load(path).graph.node if n.domain == "acme"]
    assert (len(node.input), len(node.output)) == (2, 2)


def test_without_a_mapping_an_autograd_function_is_what_it_computes(tmp_path):
    program = captured(tmp_path, FUNCTION, INPUTS, AXES)
    file = onnx_export.write(program, tmp_path, opset_max=18)
    assert onnx_ops.nodes_in(tmp_path / file.name) == ()
    assert_equal(program, tmp_path / file.name)


def test_a_node_whose_function_computes_something_else_is_refused(tmp_path):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library(factor='1.5f')}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    with pytest.raises(LoweringError, match="other values than the model"):
        onnx_export.write(program, tmp_path, opset_max=18)


def foreign_model(path: Path, domain: str, kind: str, **attributes) -> Path:
    """An ONNX file of the user's: y = relu(foreign(x)) for x [n, 4]."""
    nodes = [helper.make_node(kind, ["x"], ["s"], domain=domain, **attributes), helper.make_node("Relu", ["s"], ["y"])]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    made = helper.make_model(
        helper.make_graph(nodes, "g", value[:1], value[1:]),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)], ir_version=8,
    )  # fmt: skip
    onnx.save(made, path)
    return path


def test_an_onnx_file_with_foreign_nodes_runs_with_its_library(tmp_path):
    foreign_model(tmp_path / "model.onnx", "acme", "Scale", alpha=3.0)
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}}}}}"
    program = captured(tmp_path, "", INPUTS, AXES, model="model.onnx", custom_ops=mapped)
    assert isinstance(program, OnnxGraph)
    out = tmp_path / "out"
    out.mkdir()
    lowered = ort_backend.lower(program, load_profile(PROFILES[HERE]), out)
    assert lowered.candidates and onnx_ops.nodes_in(out / "float.onnx") == ("acme::Scale",)
    x = np.array([[1, -2, 3, -4]], np.float32)
    np.testing.assert_allclose(answers(out / "float.onnx", x, ort_library()), np.maximum(3 * x, 0))


def test_an_onnx_file_with_foreign_nodes_and_no_library_is_refused_with_the_key(tmp_path):
    foreign_model(tmp_path / "model.onnx", "acme", "Scale", alpha=3.0)
    with pytest.raises(ModelError) as caught:
        captured(tmp_path, "", INPUTS, AXES, model="model.onnx")
    assert "custom_ops: {'acme::Scale': {onnxruntime:" in caught.value.todo
