"""Rules in a build: among our own passes, over dynamic sizes, into the files, from a project, in linear time."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeopt.backends import onnx_export, torchscript
from edgeopt.errors import ProfileError, ProjectError
from edgeopt.passes import Run, load_rules, optimize
from edgeopt.passes.rules_run import as_pass
from edgeopt.program import graph
from edgeopt.rules import rule
from edgeopt.spec.project import load_project
from tests.passes.rules_support import (
    ATTENTION,
    FUSED,
    SDPA,
    SILU,
    Of,
    SelfAttention,
    applied,
    attention,
    finds,
    fused,
    silu,
)
from tests.passes.support import PROFILE, assert_equal, program


def test_a_rule_comes_before_our_own_attention_pass():
    """The user's replacement for attention, and not ours, stands in the end; and where torch's operator stood too."""
    made = rule(
        pattern=[attention, fused], inputs=ATTENTION,
        replacement=lambda q, k, v: torch.softmax(torch.matmul(q, k.mT) * q.shape[-1] ** -0.5, -1, torch.float32) @ v,
    )  # fmt: skip
    for module in (SelfAttention(), Of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))):
        shapes = [("N", 5, 32)] if isinstance(module, SelfAttention) else [("N", 2, 5, 8)] * 3
        given = program(module, *shapes)
        result, records = optimize(given, PROFILE, {}, Run(rules=(as_pass("mine", made),)))
        by_name = {record.name: record for record in records}
        names = list(by_name)
        assert by_name["rule:mine"].changed == 1
        assert names.index("rule:mine") == names.index("no_ops") + 1
        assert_equal(result, given)


def test_no_guard_is_added_to_dynamic_sizes_and_the_program_given_is_untouched():
    given = program(SelfAttention(), ("N", 5, 32))
    value = next(n for n in given.module.graph.nodes if n.op == "placeholder").meta["val"]
    env = value.fake_mode.shape_env
    before = (len(env.guards), dict(env.replacements), str(env.var_to_range), given.module.code)
    result, _ = finds(FUSED, SelfAttention(), ("N", 5, 32))
    applied(FUSED, given)
    applied(
        rule(pattern=lambda q, k, v: q @ k.mT @ v, replacement=lambda q, k, v: q @ (k.mT @ v), inputs=ATTENTION), given
    )
    assert (len(env.guards), dict(env.replacements), str(env.var_to_range), given.module.code) == before
    assert isinstance(result.module.graph.output_node().args[0][0].meta["val"].shape[0], torch.SymInt)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_a_rule_puts_in_goes_through_torchscript_and_onnx(tmp_path):
    given = program(SelfAttention(), ("N", 5, 32))
    result, _ = applied(FUSED, given)
    torchscript.save(result, tmp_path / "float.pt")
    loaded = torch.jit.load(str(tmp_path / "float.pt"))
    file = onnx_export.write(result, tmp_path, opset_max=17)
    session = onnxruntime.InferenceSession(str(tmp_path / "float.onnx"), providers=["CPUExecutionProvider"])
    assert file.opset <= 17
    for size in (1, 3, 8):
        inputs = graph.synthetic(given.signature, {"N": size}, 4)
        wanted = graph.run(given, inputs)["y0"]
        with torch.no_grad():
            assert abs(loaded(*graph.to_tensors(given.signature, inputs))[0].numpy() - wanted).max() < 1e-5
        assert abs(session.run(None, inputs)[0] - wanted).max() < 1e-5


def test_new_nodes_say_where_they_come_from():
    result, _ = finds(FUSED, nn.Sequential(SelfAttention()), ("N", 5, 32))
    node = next(n for n in result.module.graph.nodes if str(n.target) == SDPA)
    assert list(node.meta["nn_module_stack"].values())[-1][0] == "inner.0"
    assert "rules_support.py" in node.meta["stack_trace"]


RULES = """
import torch
from edgeopt.rules import rule

def pattern(x):
    return x * torch.sigmoid(x)

def replacement(x):
    return torch.nn.functional.silu(x)

silu = rule(pattern=pattern, replacement=replacement, inputs={"x": (...,)})
number = 3
"""


def project(folder, code: str, *rules: str):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_rules.py").write_text(code)
    (folder / "m.py").write_text("import torch\nbuild = torch.nn.SiLU\n")
    listed = ", ".join(rules)
    (folder / "edgeopt.yaml").write_text(
        f"{{name: m, model: m.py:build, inputs: {{x: {{shape: [2]}}}}, rules: [{listed}]}}"
    )
    return load_project(folder)


def test_a_projects_rules_are_passes_that_are_switched_by_name(tmp_path):
    found = load_rules(project(tmp_path / "a", RULES, "own_rules.py:silu"))
    assert [(p.name, p.graphs, p.made_by) for p in found] == [("rule:silu", "float", "the project")]
    given = program(Of(silu), ("N", 4))
    records = {r.name: r for r in optimize(given, PROFILE, {"rule:silu": False}, Run(rules=found))[1]}
    assert records["rule:silu"].status == "off"
    with pytest.raises(ProfileError, match="did you mean 'rule:silu'"):
        optimize(given, PROFILE, {"rule:sliu": False}, Run(rules=found))


@pytest.mark.parametrize(
    ("code", "rules", "what", "where"),
    [
        (RULES, ["own_rules.py:number"], "is int, not a fusion rule", "rules"),
        (RULES, ["own_rules.py:sliu"], "has no 'sliu'", "rules"),
        (RULES, ["own_rules.py:silu", "own_rules.py:silu"], "two rules are named 'rule:silu'", "rules"),
        (RULES.replace("(...,)", "(3.0,)"), ["own_rules.py:silu"], "neither a size", "own_rules.py, line 11"),
        (RULES.replace("(x)\n\ndef rep", "(y)\n\ndef rep"), ["own_rules.py:silu"], "'y'", "own_rules.py, line 6"),
    ],
)
def test_a_project_with_a_wrong_rule_is_told_its_line(tmp_path, code, rules, what, where):
    with pytest.raises(ProjectError) as caught:
        load_rules(project(tmp_path / str(abs(hash(what))), code, *rules))
    assert what in str(caught.value) and where in caught.value.where, caught.value


def test_rules_are_linear_in_the_size_of_the_graph():
    """Nodes looked at, not seconds: 160 layers take no more steps a layer than 20."""
    from edgeopt.passes.rules_match import Search

    def steps(layers: int) -> float:
        counted = 0
        step = Search._step

        def counting(self, *args):
            nonlocal counted
            counted += 1
            return step(self, *args)

        given = program(nn.Sequential(*(Of(silu) for _ in range(layers))), ("N", 4))
        Search._step = counting
        try:
            _, record = applied(SILU, given, verified=False)
        finally:
            Search._step = step
        assert record.changed == layers
        return counted / layers

    assert steps(160) <= steps(20) * 1.01
