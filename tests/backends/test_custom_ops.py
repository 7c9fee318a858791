"""Operators of the user's own in ONNX: translated, foreign nodes that really run, or refused with the key."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

from edgeopt.backends import custom_ops as onnx_ops
from edgeopt.backends import onnx_export
from edgeopt.backends import onnxruntime as ort_backend
from edgeopt.errors import LoweringError
from edgeopt.spec.profile import load_profile
from tests.backends.custom_op_models import AXES, HERE, INPUTS, OTHER, PROFILES, TRANSLATION, assert_equal, program_of
from tests.capture.support import captured
from tests.native import ort_library


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
