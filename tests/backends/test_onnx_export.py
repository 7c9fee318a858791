"""ONNX files: opset, interface and values at every opset a target may want; what cannot be written is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from edgeopt.backends import onnx_check, onnx_export, onnx_file, onnx_legacy
from edgeopt.errors import LoweringError
from edgeopt.program import OnnxGraph, ScriptGraph, graph
from tests.backends.programs import Flat
from tests.backends.programs import case as make_case

# the older exporter is deprecated as a whole; onnx_export silences it, these tests call it directly
OLDER = pytest.mark.filterwarnings("ignore::Warning")

SIZES = {
    "residual": {"batch": 5},
    "integer": {"batch": 5},
    "unsigned": {"batch": 7},
    "transformer": {"batch": 3, "time": 11},
    "resizing": {"batch": 3, "h": 17},
}


def run(path, inputs, *, optimized=True):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options).run(None, inputs)


def largest_error(expected, found):
    return max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("opset, ir", [(13, 7), (17, 8), (20, 9)])
@pytest.mark.parametrize("name", ["residual", "transformer", "resizing"])
def test_float_programs_have_the_opset_asked_for_and_the_eager_values(case, written, name, opset, ir):
    file, path = written(name, opset)
    assert (file.name, file.opset, file.ir_version) == ("float.onnx", opset, ir)
    signature = case(name).program.signature
    assert (file.inputs, file.outputs) == (signature.inputs, signature.outputs)
    inputs = case(name).inputs(**SIZES[name])
    assert largest_error(case(name).expected(inputs), run(path, inputs)) < 1e-5


@pytest.mark.parametrize("name, opset", [("integer", 13), ("integer", 17), ("integer", 20), ("unsigned", 17)])
def test_integer_programs_keep_their_steps_at_every_opset(case, written, name, opset):
    file, path = written(name, opset)
    assert (file.name, file.opset) == ("int8.onnx", opset)
    inputs = case(name).inputs(**SIZES[name])
    (expected,), (found,) = case(name).expected(inputs), run(path, inputs, optimized=False)
    assert 10 * np.log10((expected**2).sum() / ((expected - found) ** 2).sum()) > 35
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert operators.count("DequantizeLinear") == 6 + 4  # six activations, four weights
    assert operators.count("QuantizeLinear") == 6


def test_integer_weights_are_stored_as_int8(written):
    _, float_path = written("residual", 17)
    _, path = written("integer", 17)
    assert path.stat().st_size < 0.35 * float_path.stat().st_size
    stored = {tuple(t.dims): t.data_type for t in onnx.load(path).graph.initializer if len(t.dims) == 4}
    assert set(stored.values()) == {onnx.TensorProto.INT8}


def test_a_weight_left_in_float_is_found(tmp_path, case):
    module = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    scale, zero = (onnx.numpy_helper.from_array(np.asarray(v), n) for v, n in ((np.float32(1), "s"), (np.int8(0), "z")))
    node = module.make_node("QuantizeLinear", ["w", "s", "z"], ["y"])
    out = module.make_tensor_value_info("y", onnx.TensorProto.INT8, [4, 4])
    onnx.save(module.make_model(module.make_graph([node], "g", [], [out], [weight, scale, zero])), tmp_path / "m.onnx")
    with pytest.raises(LoweringError, match="'w' is stored as float"):
        onnx_check.require_integer_weights(tmp_path / "m.onnx")


@pytest.mark.parametrize("opset", [13, 20])
def test_an_unused_input_stays(written, opset):  # case O02
    _, path = written("resizing", opset)
    assert [i.name for i in onnxruntime.InferenceSession(str(path)).get_inputs()] == ["x", "unused"]


def test_a_size_read_through_data_stays_dynamic(tmp_path):  # case O01
    class Model(torch.nn.Module):
        def forward(self, x):
            return x.reshape(x.data.size(0), -1)

    made = make_case(Model(), {"x": ("float32", "n", 3, 4)}, {"y": ("float32", "n", 12)}, axes={"n": (1, 2, 8)})
    file = onnx_export.write(made.program, tmp_path, opset_max=17)
    (found,) = run(tmp_path / file.name, made.inputs(n=5))
    assert found.shape == (5, 12)


def test_no_trace_of_this_machine_is_in_the_file(written):
    for name, opset in (("residual", 17), ("transformer", 20), ("integer", 17)):
        data = written(name, opset)[1].read_bytes()
        for word in (b".py", b"stack_trace", b"/usr", b"/root", b"/home", b"/tmp", b"site-packages", b"s77"):
            assert word not in data, (name, word)


def test_a_second_backend_finds_the_file_and_another_program_does_not(case, tmp_path):
    program = case("residual").program
    first = onnx_export.write(program, tmp_path, opset_max=18)
    before = (tmp_path / first.name).stat()
    assert onnx_export.write(program, tmp_path, opset_max=18) == first
    assert (tmp_path / first.name).stat().st_mtime_ns == before.st_mtime_ns
    onnx_export.write(case("transformer").program, tmp_path, opset_max=18)
    assert onnx_file.read_back(tmp_path / "float.onnx").inputs[0].name == "ids"


def test_weights_beyond_one_message_lie_in_a_second_file(case, tmp_path):
    file = onnx_export.write(case("residual").program, tmp_path, opset_max=17, inline_limit_bytes=20_000)
    assert file.files == ("float.onnx", "float.onnx.data")
    assert (tmp_path / "float.onnx").stat().st_size < 20_000
    inputs = case("residual").inputs(batch=2)
    assert largest_error(case("residual").expected(inputs), run(tmp_path / file.name, inputs)) < 1e-5


def test_a_file_with_other_values_is_found_and_names_output_and_sizes(case, written):
    program = case("residual").program
    other = make_case(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 10)),
        {"image": ("float32", "batch", 3, 16, 16)},
        {"logits": ("float32", "batch", 10)},
        axes={"batch": (1, 1, 8)},
    )
    with pytest.raises(LoweringError, match="on the reference inputs: output 'logits'"):
        onnx_check.compare(other.program, written("residual", 17)[1])
    onnx_check.compare(program, written("residual", 17)[1])


def test_an_operator_that_no_exporter_knows_is_named_and_leaves_no_file(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.eigvalsh(x)

    made = make_case(Model(), {"x": ("float32", 4, 4)}, {"y": ("float32", 4)})
    with pytest.raises(LoweringError, match="'aten._linalg_eigh'") as refused:
        onnx_export.write(made.program, tmp_path, opset_max=17)
    assert "opset 17" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


class Sampling(torch.nn.Module):
    def forward(self, x, grid):
        return F.grid_sample(x, grid, align_corners=False)


def test_an_operator_newer_than_the_target_is_named(tmp_path):  # case O04
    made = make_case(
        Sampling(),
        {"x": ("float32", 1, 2, 6, 6), "grid": ("float32", 1, 4, 5, 2)},
        {"y": ("float32", 1, 2, 4, 5)},
    )
    assert onnx_export.write(made.program, tmp_path, opset_max=16).opset == 16
    with pytest.raises(LoweringError, match="'GridSample' came after opset 13"):
        onnx_export.write(made.program, tmp_path, opset_max=13)
    assert list(tmp_path.iterdir()) == []


@OLDER
@pytest.mark.parametrize("opset", [13, 17])
def test_the_second_way_gives_the_same_program_with_int8_weights(case, tmp_path, opset):
    program = case("integer").program
    model = onnx_file.clean(onnx_legacy.exported(program, opset), program.signature)
    onnx_file.save(model, tmp_path / "int8.onnx")
    file = onnx_file.read_back(tmp_path / "int8.onnx")
    assert file.opset == opset
    onnx_file.check_interface(file, program.signature)
    onnx_check.require_integer_weights(tmp_path / "int8.onnx")
    onnx_check.compare(program, tmp_path / "int8.onnx")


@OLDER
def test_the_second_way_keeps_unused_inputs(case, tmp_path):
    program = case("resizing").program
    model = onnx_file.clean(onnx_legacy.exported(program, 13), program.signature)
    assert [value.name for value in model.graph.input] == ["x", "unused"]


def test_a_users_file_is_written_as_it_is_or_lowered(case, written, tmp_path):
    signature = case("transformer").program.signature
    given = OnnxGraph(signature=signature, reference=(), model=onnx.load(written("transformer", 20)[1]))
    inputs = case("transformer").inputs(batch=2, time=9)
    for opset in (20, 17, 13):
        file = onnx_export.write(given, tmp_path, opset_max=opset)
        assert file.opset == opset
        assert largest_error(case("transformer").expected(inputs), run(tmp_path / file.name, inputs)) < 1e-5


def test_a_users_file_of_an_integer_model_is_named_int8(case, written, tmp_path):
    signature = case("integer").program.signature
    model = onnx.load(written("integer", 17)[1])
    given = OnnxGraph(signature=signature, reference=(), model=model, integer=True)
    assert onnx_export.write(given, tmp_path, opset_max=17).name == "int8.onnx"


@pytest.mark.parametrize("how", ["as a number", "as an axis of one size"])
def test_sizes_that_the_project_fixes_are_written_into_a_file_that_leaves_them_open(how, case, written, tmp_path):
    signature = case("transformer").program.signature
    only = {"batch": 2, "time": 9}
    if how == "as a number":
        inputs = tuple(
            spec.model_copy(update={"shape": tuple(only.get(s, s) for s in spec.shape)}) for spec in signature.inputs
        )
        changed = dataclasses.replace(signature, inputs=inputs, axes={})
        outputs = tuple(
            spec.model_copy(update={"shape": tuple(only.get(s, s) for s in spec.shape)}) for spec in signature.outputs
        )
        changed = dataclasses.replace(changed, outputs=outputs)
    else:
        axes = {
            n: a.model_copy(update=dict.fromkeys(("min", "opt", "max"), only[n])) for n, a in signature.axes.items()
        }
        changed = dataclasses.replace(signature, axes=axes)
    given = OnnxGraph(signature=changed, reference=(), model=onnx.load(written("transformer", 17)[1]))
    file = onnx_export.write(given, tmp_path, opset_max=17)
    assert all(isinstance(size, int) for spec in (*file.inputs, *file.outputs) for size in spec.shape)
    inputs = case("transformer").inputs(**only)
    assert largest_error(case("transformer").expected(inputs), run(tmp_path / file.name, inputs)) < 1e-5


def test_a_declared_axis_that_the_graph_fixes_is_refused(case, tmp_path):
    program = case("residual").program
    inputs = tuple(s.model_copy(update={"shape": ("batch", 3, "side", 16)}) for s in program.signature.inputs)
    axes = {
        **program.signature.axes,
        "side": program.signature.axes["batch"].model_copy(update={"min": 8, "opt": 12, "max": 32}),
    }
    changed = dataclasses.replace(
        program, signature=dataclasses.replace(program.signature, inputs=inputs, axes=axes), reference=()
    )
    with pytest.raises(LoweringError):
        onnx_export.write(changed, tmp_path, opset_max=17)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_that_is_only_torchscript_gets_its_onnx_file(case, tmp_path):
    program = case("residual").program
    example = tuple(graph.to_tensors(program.signature, program.reference[0].inputs))
    module = torch.jit.freeze(torch.jit.trace(Flat(case("residual").eager).eval(), example))
    scripted = ScriptGraph(signature=program.signature, reference=program.reference, module=module)
    file = onnx_export.write(scripted, tmp_path, opset_max=13)
    assert file.opset == 13
    inputs = case("residual").inputs(batch=6)
    assert largest_error(case("residual").expected(inputs), run(tmp_path / file.name, inputs)) < 1e-5


def test_an_int32_bias_becomes_its_float_value_on_the_second_way(tmp_path):
    class Model(torch.nn.Module):
        """A linear layer whose bias is int32 at the scale of its accumulator, as the placement for x86 stores it."""

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 128, (4, 8), dtype=torch.int8))
            self.register_buffer("bias", torch.randint(-5000, 5000, (4,), dtype=torch.int32))
            self.register_buffer("scale", torch.full((4,), 0.01))
            self.register_buffer("bias_scale", torch.full((4,), 0.001))
            self.register_buffer("zero", torch.zeros(4, dtype=torch.int64))

        def forward(self, x):
            q = torch.ops.quantized_decomposed
            weight = q.dequantize_per_channel(self.weight, self.scale, self.zero, 0, -128, 127, torch.int8)
            bias = q.dequantize_per_channel(self.bias, self.bias_scale, self.zero, 0, -(2**31), 2**31 - 1, torch.int32)
            x = q.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8)
            return F.linear(q.dequantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8), weight, bias)

    torch.manual_seed(0)
    made = make_case(
        Model(), {"x": ("float32", "n", 8)}, {"y": ("float32", "n", 4)}, axes={"n": (1, 2, 8)}, integer=True
    )
    module = onnx_legacy.fake_quantized(made.program.module)
    inputs = made.inputs(n=5)
    (found,) = module(*graph.to_tensors(made.program.signature, inputs))
    assert largest_error(made.expected(inputs), [found.numpy()]) < 1e-4
