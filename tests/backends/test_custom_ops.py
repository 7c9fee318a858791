"""Operators of the user's own in each runtime: translated, foreign nodes that really run, or refused with the key."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edgeopt import passes
from edgeopt.backends import custom_ops as onnx_ops
from edgeopt.backends import onnx_export, tensorrt, torchscript
from edgeopt.backends import onnxruntime as ort_backend
from edgeopt.capture import serialise
from edgeopt.errors import LoweringError, ModelError
from edgeopt.program import ExportedGraph, OnnxGraph, foreign, graph
from edgeopt.quant import convert
from edgeopt.spec.manifest import EngineRecipe
from edgeopt.spec.profile import load_profile
from tests.capture.support import captured
from tests.native import ort_library, torch_library

INPUTS = {"x": {"shape": ["n", 4]}}
AXES = {"n": {"min": 1, "opt": 2, "max": 8}}
HERE = platform.machine()
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[HERE]
PROFILES = {"x86_64": "x86-cpu", "aarch64": "arm64-cpu"}

OPS = """
import torch
@torch.library.custom_op("{name}::scale", mutates_args=())
def scale(x: torch.Tensor, alpha: float = 2.0) -> torch.Tensor:
    return x * alpha
@scale.register_fake
def _(x, alpha=2.0):
    return torch.empty_like(x)
"""
MODEL = """
import {name}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return {name}.scale(self.layer(x), 3.0) + {name}.scale(self.layer(x))
"""
TRANSLATION = """
from onnxscript import opset18 as op
def scale(x, alpha=2.0):
    return op.Mul(x, op.Constant(value_float=alpha))
def wrong(x, alpha=2.0):
    return op.Add(x, op.Constant(value_float=alpha))
def failing(x, alpha=2.0):
    raise ValueError("no such thing")
"""


def program_of(folder: Path, name: str, mapped: str | None = None, **keys) -> ExportedGraph:
    """The model with two calls of NAME::scale; `mapped` is the YAML of its entry under custom_ops."""
    (folder / f"{name}.py").write_text(OPS.format(name=name))
    (folder / "to_onnx.py").write_text(TRANSLATION)
    if mapped is not None:
        keys["custom_ops"] = f"{{'{name}::scale': {mapped}}}"
    keys.setdefault("op_libraries", f"[{name}.py]")
    return captured(folder, MODEL.format(name=name), INPUTS, AXES, **keys)


def answers(file: Path, x: np.ndarray, *libraries: Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    for library in libraries:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(str(file), options).run(None, {"x": x})[0]


def assert_equal(program: ExportedGraph, file: Path, *libraries: Path) -> None:
    for size in (1, 3, 8):
        x = np.random.default_rng(size).normal(size=(size, 4)).astype(np.float32)
        wanted = graph.run(program, {"x": x})["output"]
        np.testing.assert_allclose(answers(file, x, *libraries), wanted, atol=1e-5)


@pytest.mark.parametrize("opset", [20, 17, 13])
def test_a_translation_of_the_users_gives_onnx_alone(tmp_path, opset):
    program = program_of(tmp_path, f"tr_plain{opset}", "{onnx: to_onnx.py:scale}")
    file = onnx_export.write(program, tmp_path, opset_max=opset)
    assert file.opset <= opset and onnx_ops.nodes_in(tmp_path / file.name) == ()
    assert_equal(program, tmp_path / file.name)


def test_a_translation_that_is_not_the_operator_is_refused(tmp_path):
    program = program_of(tmp_path, "tr_wrong", "{onnx: to_onnx.py:wrong}")
    with pytest.raises(LoweringError, match="other values than the model"):
        onnx_export.write(program, tmp_path, opset_max=18)
    assert not (tmp_path / "float.onnx").exists()


def test_a_translation_that_fails_names_the_users_line(tmp_path):
    program = program_of(tmp_path, "tr_fails", "{onnx: to_onnx.py:failing}")
    with pytest.raises(LoweringError) as caught:
        onnx_export.write(program, tmp_path, opset_max=18)
    line = TRANSLATION.splitlines().index('    raise ValueError("no such thing")') + 1
    assert "tr_fails::scale" in caught.value.what and f"to_onnx.py, line {line}" in caught.value.what


def test_a_translation_that_is_not_there_is_refused_with_what_was_meant(tmp_path):
    program = program_of(tmp_path, "tr_absent", "{onnx: to_onnx.py:scael}")
    with pytest.raises(LoweringError, match="did you mean 'scale'"):
        onnx_export.write(program, tmp_path, opset_max=18)


def test_without_a_form_the_candidate_is_refused_with_the_key_to_add(tmp_path):
    lowered = ort_backend.lower(program_of(tmp_path, "tr_none"), load_profile(PROFILES[HERE]), tmp_path)
    assert not lowered.candidates
    assert "custom_ops: {'tr_none::scale': {onnx:" in lowered.refused[0].reason


@pytest.mark.parametrize("opset", [20, 17, 13])
def test_a_node_that_a_library_of_onnxruntimes_runs(tmp_path, opset):
    """The library is compiled here, and the file is equal to the model with it."""
    mapped = f"{{node: 'acme::Scale', onnxruntime: {ort_library()}}}"
    program = program_of(tmp_path, f"node_runs{opset}", mapped)
    file = onnx_export.write(program, tmp_path, opset_max=opset)
    assert file.opset <= opset and onnx_ops.nodes_in(tmp_path / file.name) == ("acme::Scale",)
    model = onnx.load(tmp_path / file.name)
    onnx.checker.check_model(model, full_check=True)
    assert {(o.domain, o.version) for o in model.opset_import} >= {("acme", 1)}
    nodes = [node for node in model.graph.node if node.domain == "acme"]
    assert sorted(helper.get_attribute_value(node.attribute[0]) for node in nodes) == [2.0, 3.0]
    assert_equal(program, tmp_path / file.name, ort_library())


def test_a_library_that_computes_something_else_is_refused(tmp_path):
    mapped = f"{{node: 'acme::Scale', onnxruntime: {ort_library(factor='1.5f')}}}"
    with pytest.raises(LoweringError, match="other values than the model"):
        onnx_export.write(program_of(tmp_path, "node_wrong", mapped), tmp_path, opset_max=18)


def test_a_node_without_a_library_is_refused_with_the_key_to_add(tmp_path):
    program = program_of(tmp_path, "node_alone", "{node: 'acme::Other'}")
    lowered = ort_backend.lower(program, load_profile(PROFILES[HERE]), tmp_path)
    assert (
        "custom_ops: {'acme::Other': {onnxruntime:" in lowered.refused[0].reason and HERE in lowered.refused[0].reason
    )


def test_a_library_for_this_machine_alone_is_refused_for_another_target(tmp_path):
    mapped = f"{{node: 'acme::Scale', onnxruntime: {ort_library()}}}"
    program = program_of(tmp_path, "node_arch", mapped)
    assert ort_backend.lower(program, load_profile(PROFILES[HERE]), tmp_path).candidates
    lowered = ort_backend.lower(program, load_profile(PROFILES[OTHER]), tmp_path)
    assert f"there is no library for {OTHER}" in lowered.refused[0].reason


def test_a_library_for_each_machine_serves_both(tmp_path):
    mapped = f"{{node: 'acme::Scale', onnxruntime: [{ort_library()}, {ort_library(OTHER)}]}}"
    program = program_of(tmp_path, "node_archs", mapped)
    for arch in (HERE, OTHER):
        assert ort_backend.lower(program, load_profile(PROFILES[arch]), tmp_path).candidates
        (library,) = program.custom_ops.for_onnxruntime(arch, ["acme::Scale"])
        assert library.arch == arch and library.artifact_path.startswith(f"ops/{arch}/")


FUSED = """
import torch
@torch.library.custom_op("ms_fused::fused", mutates_args=())
def fused(a: torch.Tensor, b: torch.Tensor, alpha: float, transA: bool, transB: bool) -> torch.Tensor:
    return alpha * (a.mT if transA else a) @ (b.mT if transB else b)
@fused.register_fake
def _(a, b, alpha, transA, transB):
    return ((a.mT if transA else a) @ (b.mT if transB else b)).clone()
"""


def test_a_node_of_onnxruntimes_own_domain_needs_no_library(tmp_path):
    """com.microsoft::FusedMatMul, with a constant operand and arguments as attributes."""
    (tmp_path / "ms_fused.py").write_text(FUSED)
    model = """
    import ms_fused
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(3, 4))
        def forward(self, x):
            return torch.relu(ms_fused.fused(x, self.weight, 0.5, False, True))
    """
    program = captured(
        tmp_path, model, INPUTS, AXES, op_libraries="[ms_fused.py]",
        custom_ops="{'ms_fused::fused': {node: 'com.microsoft::FusedMatMul'}}",
    )  # fmt: skip
    lowered = ort_backend.lower(program, load_profile(PROFILES[HERE]), tmp_path)
    assert [c.name for c in lowered.candidates] == ["onnxruntime-fp32"]
    (node,) = [n for n in onnx.load(tmp_path / "float.onnx").graph.node if n.domain]
    held = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert (node.op_type, held) == ("FusedMatMul", {"alpha": 0.5, "transA": 0, "transB": 1})
    assert_equal(program, tmp_path / "float.onnx")


def test_an_argument_that_follows_an_axis_has_no_attribute(tmp_path):
    (tmp_path / "size_op.py").write_text(
        "import torch\n@torch.library.custom_op('size_op::tile', mutates_args=())\n"
        "def tile(x: torch.Tensor, n: int) -> torch.Tensor:\n    return x * n\n"
        "@tile.register_fake\ndef _(x, n):\n    return torch.empty_like(x)\n"
    )
    model = """
    import size_op
    class Model(nn.Module):
        def forward(self, x):
            return size_op.tile(x, x.shape[0])
    """
    program = captured(
        tmp_path, model, INPUTS, AXES, op_libraries="[size_op.py]", custom_ops="{'size_op::tile': {node: 'acme::Tile'}}"
    )
    with pytest.raises(LoweringError, match="argument 'n' changes with the inputs' sizes"):
        onnx_export.write(program, tmp_path, opset_max=18)


def test_an_operator_that_writes_stays_in_torch_and_is_refused_in_onnx(tmp_path):
    (tmp_path / "mut_op.py").write_text(
        "import torch\n@torch.library.custom_op('mut_op::add_', mutates_args={'x'})\n"
        "def add_(x: torch.Tensor, value: float) -> None:\n    x.add_(value)\n"
        "@add_.register_fake\ndef _(x, value):\n    return None\n"
    )
    model = """
    import mut_op
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            mut_op.add_(y, 1.5)
            return y
    """
    program = captured(tmp_path, model, INPUTS, AXES, op_libraries="[mut_op.py]")
    with pytest.raises(LoweringError, match="writes to its argument 'x'"):
        onnx_export.write(program, tmp_path, opset_max=18)
    assert torchscript.lower(program, load_profile(PROFILES[HERE]), tmp_path).candidates


def test_the_torchscript_file_is_proved_with_its_libraries(tmp_path):
    """Case G09: it is loaded by the runner in a fresh process, which knows the operator only by the library."""
    program = program_of(tmp_path, "ts_op")
    lowered = torchscript.lower(program, load_profile(PROFILES[HERE]), tmp_path)
    assert [c.name for c in lowered.candidates] == ["torchscript-fp32"]


def test_an_operator_that_no_library_defines_is_refused_with_its_name(tmp_path):
    """The model's own file defines it, which the device does not get."""
    program = program_of(tmp_path, "ts_unknown", op_libraries="[]")
    lowered = torchscript.lower(program, load_profile(PROFILES[HERE]), tmp_path)
    assert "no operator ts_unknown::scale" in lowered.refused[0].reason and "op_libraries" in lowered.refused[0].reason


IMPORTS = {
    "edgeopt": "import edgeopt.errors",
    "onnxscript": "from onnxscript import opset18",
    "in a branch": "if True:\n    import onnx",
    "relative": "from . import other",
}


@pytest.mark.parametrize("case", IMPORTS)
def test_a_python_library_that_imports_what_no_device_has_is_refused(tmp_path, case):
    from edgeopt.ports.op_library import foreign_imports

    path = tmp_path / "library.py"
    path.write_text(f"import torch\n{IMPORTS[case]}\n")
    (found,) = foreign_imports(path)
    assert found[1] == 2 + (case == "in a branch")
    path.write_text("import torch\ndef to_onnx(x):\n    from onnxscript import opset18\n")
    assert foreign_imports(path) == []


def test_a_compiled_operator_runs_in_torchscript(tmp_path):
    (tmp_path / "twice_fake.py").write_text(
        "import torch\n@torch.library.register_fake('native_ops::twice', allow_override=True)\n"
        "def _(x):\n    return torch.empty_like(x)\n"
    )
    model = """
    class Model(nn.Module):
        def forward(self, x):
            return torch.ops.native_ops.twice(x).relu()
    """
    libraries = [str(torch_library()), str(torch_library(OTHER)), "twice_fake.py"]
    program = captured(tmp_path, model, INPUTS, AXES, op_libraries=f"[{', '.join(libraries)}]")
    lowered = torchscript.lower(program, load_profile(PROFILES[HERE]), tmp_path)
    assert [c.name for c in lowered.candidates] == ["torchscript-fp32"]


def test_a_compiled_operator_without_a_library_for_the_target_is_refused(tmp_path):
    model = """
    class Model(nn.Module):
        def forward(self, x):
            return x.relu()
    """
    program = captured(tmp_path, model, INPUTS, AXES, op_libraries=f"[{torch_library()}]")
    lowered = torchscript.lower(program, load_profile(PROFILES[OTHER]), tmp_path)
    assert f"there is no library for {OTHER}" in lowered.refused[0].reason
    assert f"is for {HERE}" in lowered.refused[0].reason


FUNCTION = """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        return x * alpha
    @staticmethod
    def symbolic(g, x, alpha):
        return g.op("acme::Scale", x, alpha_f=alpha)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return Scale.apply(torch.relu(Scale.apply(self.layer(x), 3.0)), 0.5)
"""


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


def test_tensorrts_plugins_travel_in_the_recipe(tmp_path):
    """As data: no TensorRT is here. The file is judged by onnxruntime's library of the same node."""
    shutil.copy(ort_library("aarch64"), tmp_path / "libplugin.so")  # any shared library for the target
    plugin = "tensorrt: libplugin.so, plugin: Scale, plugin_version: '2'"
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}, {plugin}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert {c.precision for c in lowered.candidates} == {"fp32", "fp16"}
    assert all(recipe.plugins == ("ops/aarch64/libplugin.so",) for recipe in lowered.recipes)
    (node, _) = [n for n in onnx.load(tmp_path / "float.onnx").graph.node if n.op_type == "Scale"]
    held = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert held == {"alpha": 3.0, "plugin_version": b"2"}


@pytest.mark.parametrize(
    ("version", "option"),
    [("8.2.1", "--plugins"), ("8.5.2", "--plugins"), ("8.6.1", "--staticPlugins"), ("10.3", "--staticPlugins")],
)
def test_what_trtexec_is_told_of_plugins(version, option):
    recipe = EngineRecipe(
        candidate="tensorrt-fp32", shapes={}, typing="weak", plugins=("ops/aarch64/a.so", "ops/aarch64/b.so")
    )
    assert tensorrt.plugin_arguments(recipe, version) == (f"{option}=ops/aarch64/a.so", f"{option}=ops/aarch64/b.so")


def test_without_a_plugin_the_engine_is_refused_with_the_key_to_add(tmp_path):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert not lowered.candidates and "custom_ops: {'acme::Scale': {tensorrt:" in lowered.refused[0].reason


def test_a_plugin_for_another_machine_is_refused(tmp_path):
    shutil.copy(ort_library("x86_64"), tmp_path / "libplugin.so")
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}, tensorrt: libplugin.so}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert "there is no library for aarch64: libplugin.so is for x86_64" in lowered.refused[0].reason


def test_a_plugin_that_tensorrt_has_itself_needs_no_library(tmp_path):
    mapped = f"{{'acme::Scale': {{onnxruntime: {ort_library()}, plugin: Scale}}}}"
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops=mapped)
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert lowered.candidates and all(recipe.plugins == () for recipe in lowered.recipes)


def test_a_file_that_nothing_here_can_run_is_refused(tmp_path):
    shutil.copy(ort_library("aarch64"), tmp_path / "libplugin.so")
    program = captured(tmp_path, FUNCTION, INPUTS, AXES, custom_ops="{'acme::Scale': {tensorrt: libplugin.so}}")
    lowered = tensorrt.lower(program, load_profile("xavier"), tmp_path)
    assert "cannot be judged on this machine" in lowered.refused[0].reason and HERE in lowered.refused[0].reason
