"""Programs with scripted parts as ONNX, TorchScript and integers, against eager at sizes that capture did not see."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from edgeopt.backends import onnx_export, onnx_legacy, parts, script_reload, torchscript
from edgeopt.capture import serialise
from edgeopt.errors import LoweringError
from edgeopt.passes import optimize
from edgeopt.program import ExportedGraph, Signature, graph
from edgeopt.program.parts import NAMESPACE, part_of, parts_of
from edgeopt.quant.convert import convert, from_batches
from edgeopt.quant.finetune import train
from edgeopt.quant.prepare import prepare
from edgeopt.runtime.compare import output_errors
from edgeopt.spec.manifest import Axis, TensorSpec
from edgeopt.spec.profile import load_profile
from edgeopt.spec.project import Qat
from tests.capture.mixed import (
    BACKBONE,
    MODELS,
    NT,
    STEPS,
    Captured,
    answers,
    assert_equal_to_eager,
    eager,
    feeds,
)
from tests.capture.support import captured
from tests.passes.support import PROFILE

WRITTEN = [
    "rows", "branch", "crnn", "gru, batch first", "lstm with states", "lstm, projected, batch first",
    "shared, called in two forms", "two", "integers", "a loop over a size computed of an axis", "gives what it takes",
    "twice as long and one more", "arguments by name, lists and constants", "a module that is TorchScript already",
]  # fmt: skip
NO_ONNX = "lstm, projected, batch first"  # ONNX's LSTM has no projection


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Captured:
    return Captured(tmp_path_factory.mktemp("models"))


def session(path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run_onnx(path, program):
    opened = session(path)
    names = list(program.signature.output_names)
    return lambda inputs: dict(zip(names, opened.run(names, inputs), strict=True))


@pytest.mark.parametrize("opset", [20, 17, 13])
@pytest.mark.parametrize("name", [name for name in WRITTEN if name != NO_ONNX])
def test_onnx_equals_eager_with_the_part_in_its_place(models, tmp_path, name, opset):
    program = models.program(name)
    file = onnx_export.write(program, tmp_path, opset_max=opset)
    assert file.opset <= opset
    model = onnx.load(tmp_path / "float.onnx")
    assert {entry.domain for entry in model.opset_import} <= {"", "ai.onnx"} and not model.functions
    assert NAMESPACE not in str(model) and "edgeopt/capture" not in str(model)
    assert_equal_to_eager(run_onnx(tmp_path / "float.onnx", program), program, models.eager(name))


@pytest.mark.parametrize("name", ["crnn", "shared, called in two forms", "integers"])
def test_onnx_after_the_graph_passes(models, tmp_path, name):
    program, _ = optimize(models.program(name), PROFILE, {})
    onnx_export.write(program, tmp_path, opset_max=17)
    assert_equal_to_eager(run_onnx(tmp_path / "float.onnx", program), program, models.eager(name))


def test_what_is_around_a_part_is_written_by_todays_exporter(models):
    """Not only by the older exporter, which takes the whole as a script."""
    program = models.program("crnn")
    model = onnx_export._by_exporter(program, 17)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("LSTM") == 1 and "Conv" in kinds
    assert any(node.name.startswith("part0/") for node in model.graph.node)


def test_two_calls_of_one_part_share_its_weights(models, tmp_path):
    program = models.program("shared, called in two forms")
    model = onnx_export._by_exporter(program, 17)
    rnn = models.eager("shared, called in two forms").rnn
    assert len(parts_of(program.module)) == 2  # each form of call is an operator of its own
    assert sum(node.op_type == "LSTM" for node in model.graph.node) == 3
    shapes = sorted(tuple(t.dims)[1:] for t in model.graph.initializer if len(t.dims) == 3)
    assert shapes == sorted(tuple(p.shape) for p in rnn.parameters() if p.dim() == 2)


def test_a_part_that_onnx_has_no_operator_for_is_named(models, tmp_path):
    with pytest.raises(LoweringError, match="the scripted part 'rnn'"):
        onnx_export.write(models.program(NO_ONNX), tmp_path, opset_max=17)
    assert not list(tmp_path.iterdir())


def test_a_written_part_that_gives_other_values_is_found(models):
    """The proof of a part alone: another part's graph under its name, wrong on one branch only."""
    part = parts_of(models.program("branch").module)[0]
    names = ["x0"], ["y0"]
    varying = {"x0": {0: "n"}, "y0": {0: "n"}}
    right = onnx_legacy.written(part.module, part.examples[-1], 17, *names, varying)
    parts._prove(part, right, *names)
    wrong = onnx.ModelProto()
    wrong.CopyFrom(right)
    branches = next(node for node in wrong.graph.node if node.op_type == "If").attribute
    then, other = (next(a for a in branches if a.name == name) for name in ("then_branch", "else_branch"))
    then.g.CopyFrom(other.g)
    with pytest.raises(LoweringError, match="other values than the model in the scripted part 'branch'"):
        parts._prove(part, wrong, *names)


@pytest.mark.parametrize("name", WRITTEN)
def test_torchscript_holds_the_part_and_loads_in_another_process(models, tmp_path, name):
    program = models.program(name)
    torchscript.save(program, tmp_path / "float.pt")
    script_reload.check(program, tmp_path / "float.pt", python=__import__("sys").executable)
    loaded = torch.jit.load(tmp_path / "float.pt")
    used = {node.kind() for node in loaded.inlined_graph.nodes()}
    assert not any(kind.startswith(NAMESPACE) for kind in used)

    def run(inputs):
        with torch.no_grad():
            given = loaded(*(torch.from_numpy(inputs[n].copy()) for n in program.signature.input_names))
        return graph.to_arrays(program.signature, given)

    assert_equal_to_eager(run, program, models.eager(name))


def test_torchscript_is_the_same_bytes_twice(models):
    program = models.program("crnn")
    assert torchscript.encode(program) == torchscript.encode(program)


def batches(program, count: int, seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        sizes = {"N": 4, "W": int(rng.integers(8, 40))}
        yield graph.synthetic(program.signature, sizes, int(rng.integers(1 << 30)))


@pytest.mark.parametrize("profile", ["x86-cpu", "orin-nano"])
def test_int8_keeps_the_part_float_and_makes_what_is_around_it_integer(models, tmp_path, profile):
    program, _ = optimize(models.program("crnn"), PROFILE, {})
    quantization = load_profile(profile).quantization
    integer, report = from_batches(program, quantization, batches(program, 8, 1))
    assert [p.name for p in parts_of(integer.module)] == [p.name for p in parts_of(program.module)]
    onnx_export.write(integer, tmp_path, opset_max=17)
    model = onnx.load(tmp_path / "int8.onnx")
    made = {output: node.op_type for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.op_type == "Conv":
            assert [made.get(name) for name in node.input[:2]] == ["DequantizeLinear"] * 2
        if node.op_type == "LSTM":
            assert all(made.get(name) != "DequantizeLinear" for name in node.input[1:3])
    assert sum(node.op_type == "Conv" for node in model.graph.node) == 2
    assert sum(node.op_type == "LSTM" for node in model.graph.node) == 1
    run = run_onnx(tmp_path / "int8.onnx", program)
    cases = list(batches(program, 6, 2))
    errors = output_errors([graph.run(program, case) for case in cases], [run(case) for case in cases])
    assert errors["output"].sqnr_db > 25, errors


def test_an_integer_program_is_cached_with_its_axes(models, tmp_path):
    """A size such as W // 2 before a cast or a quantize makes conditions that torch cannot prove."""
    program, _ = optimize(models.program("crnn"), PROFILE, {})
    integer, _ = from_batches(program, load_profile("x86-cpu").quantization, batches(program, 4, 1))
    serialise.save(integer, tmp_path / "cache")
    again = serialise.load(tmp_path / "cache")
    for inputs in feeds(program):
        np.testing.assert_array_equal(graph.run(again, inputs)["output"], graph.run(integer, inputs)["output"])


def test_a_graph_that_export_would_change_is_not_exported_again():
    def twice_or_thrice(x):
        return x * 2 if x.shape[0] == 3 else x * 3

    traced = torch.fx.Graph()
    traced.output((traced.call_function(twice_or_thrice, (traced.placeholder("x"),)),))
    module = torch.fx.GraphModule(torch.nn.Module(), traced)
    signature = Signature(
        (TensorSpec(name="x", dtype="float32", shape=("N", 2)),),
        (TensorSpec(name="y", dtype="float32", shape=("N", 2)),),
        {"N": Axis(min=1, opt=3, max=8)}, None, {},
    )  # fmt: skip
    with pytest.raises(torch._dynamo.exc.UserError, match="generated guard 3 <= .* <= 3"):
        graph.export(ExportedGraph(signature, (), module=module))


def test_fine_tuning_moves_what_is_before_and_behind_a_part_and_not_the_part(models, tmp_path):
    program, _ = optimize(models.program("crnn"), PROFILE, {})
    part = parts_of(program.module)[0]
    before = [value.clone() for value in part.module.parameters()]
    prepared = prepare(program, load_profile("x86-cpu").quantization, qat=True)
    loader = [(inputs, np.float32(0.3)) for inputs in batches(program, 6, 3)]

    def loss(output, target):
        return ((output - torch.as_tensor(target)) ** 2).mean()

    training = train(prepared, lambda: loader, loss, Qat(epochs=4, learning_rate=1e-2), seed=1)
    assert training.details["last_loss"] < training.details["first_loss"]
    own = dict(program.module.named_parameters())
    assert not {name for name in own if torch.equal(training.state[name], own[name].detach())}
    assert len(own) == 6  # weight and bias of two convolutions and a linear layer
    assert all(torch.equal(a, b) for a, b in zip(before, part.module.parameters(), strict=True))
    integer, _ = convert(prepared)
    onnx_export.write(integer, tmp_path, opset_max=17)


def test_a_part_whose_script_the_older_exporter_cannot_write_is_named_and_leaves_no_file(tmp_path):
    code = BACKBONE + """
class Sorted(nn.Module):
    def forward(self, x):
        for i in range(x.size(0)):
            if x[i].sum() > 0:
                x = torch.linalg.matrix_exp(x[:, :6, :6]) if x.size(2) == 6 else x
        return x
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.sorted = seeded(nn.Linear, 6, 6), Sorted()
    def forward(self, x):
        return self.sorted(self.head(x) / 50)
"""  # fmt: skip
    program = captured(tmp_path, code, {"x": {"shape": ["T", 6, 6]}}, {"T": {"min": 1, "opt": 3, "max": 5}})
    assert parts_of(program.module)
    (tmp_path / "out").mkdir()
    with pytest.raises(LoweringError, match="the scripted part 'sorted'"):
        onnx_export.write(program, tmp_path / "out", opset_max=17)
    assert not list((tmp_path / "out").iterdir())


def test_a_changed_part_is_another_file(models, tmp_path):
    """The note beside a file tells programs apart by what is inside their parts too."""
    code = MODELS["plain rnn"].code
    first = captured(tmp_path / "a", code, STEPS, NT)
    second = captured(tmp_path / "b", code.replace("manual_seed(3)", "manual_seed(4)"), STEPS, NT)
    out = tmp_path / "out"
    out.mkdir()
    inputs = feeds(first)[4]
    for program in (first, second):
        onnx_export.write(program, out, opset_max=17)
        wanted = graph.run(program, inputs)
        np.testing.assert_allclose(run_onnx(out / "float.onnx", program)(inputs)["output"], wanted["output"], atol=1e-5)


def test_a_copied_graph_with_a_part_still_runs_after_the_program_is_gone(tmp_path):
    """The operator of a part stays in the process, since graphs may outlive the program that they came with."""
    code = MODELS["rows"].code.replace("manual_seed(3)", "manual_seed(5)")  # a part that no other test holds
    program = captured(tmp_path, code, MODELS["rows"].inputs, MODELS["rows"].axes)
    inputs, module, seen = feeds(program), graph.copied(program.module), weakref.ref(program)
    del program
    gc.collect()
    assert seen() is None
    (label,) = (part_of(n).label for n in module.graph.nodes if part_of(n))
    assert label == "rows"
    for given in inputs:
        with torch.no_grad():
            (got,) = module(torch.from_numpy(given["x"]))
        np.testing.assert_allclose(got.numpy(), *answers(eager(tmp_path), given), atol=1e-5)
