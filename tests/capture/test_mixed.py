"""Models captured as an exported graph around scripted parts, against eager at sizes that capture did not see."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from edgeopt.capture import serialise
from edgeopt.capture.declined import Declined
from edgeopt.capture.parts_calls import Recorded
from edgeopt.capture.parts_sizes import outputs_of
from edgeopt.errors import CaptureError, ModelError
from edgeopt.passes import optimize
from edgeopt.program import ExportedGraph, ScriptGraph, graph
from edgeopt.program.parts import Size, part_of, parts_of, size_bytes
from tests.capture.mixed import (
    BACKBONE,
    BRANCH,
    IMAGE,
    MODELS,
    NT,
    ROWS,
    STEPS,
    Captured,
    N,
    answers,
    assert_equal_to_eager,
    eager,
    feeds,
    run_graph,
)
from tests.capture.support import captured
from tests.passes.support import PROFILE


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Captured:
    return Captured(tmp_path_factory.mktemp("models"))


def kept(program: ExportedGraph) -> tuple[str, ...]:
    head = "kept as TorchScript in the graph: '"
    return tuple(note.removeprefix(head).split("'")[0] for note in program.notes if note.startswith(head))


def stored(module: nn.Module) -> set[str]:
    """The names of the module's floating-point parameters and buffers."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name for name, value in named if value.is_floating_point()}


def outside(names: set[str], paths: tuple[str, ...]) -> set[str]:
    return {name for name in names if not name.startswith(tuple(f"{path}." for path in paths))}


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_equals_eager_and_the_smallest_modules_are_kept(models, name):
    program = models.program(name)
    assert isinstance(program, ExportedGraph), program.notes
    assert sorted(kept(program)) == sorted(MODELS[name].kept)
    assert {part.label for part in parts_of(program.module)} == set(MODELS[name].kept)
    assert stored(program.module) == outside(stored(models.eager(name)), MODELS[name].kept)
    assert_equal_to_eager(run_graph(program), program, models.eager(name))


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_passes_keep_the_answer(models, name):
    program = models.program(name)
    result, records = optimize(program, PROFILE, {})
    assert not [r for r in records if r.status == "dropped"]
    assert {p.name for p in parts_of(result.module)} == {p.name for p in parts_of(program.module)}
    assert_equal_to_eager(run_graph(result), result, models.eager(name))
    assert stored(result.module) == outside(stored(result.module), MODELS[name].kept)


def test_batch_norms_around_a_part_are_folded(models):
    result, records = optimize(models.program("crnn"), PROFILE, {})
    assert {r.name: r.changed for r in records}["conv_bn"] == 1
    assert not [n for n in result.module.graph.nodes if "batch_norm" in str(n.target)]


@pytest.mark.parametrize("name", ["crnn", "shared, called in two forms", "integers"])
def test_it_is_cached_and_read_in_another_process(tmp_path, models, name):
    program = models.program(name)
    serialise.save(program, tmp_path / "cache")
    inputs = feeds(program)[4]
    np.savez(tmp_path / "in.npz", **inputs)
    code = """
import sys, numpy as np
from pathlib import Path
from edgeopt.capture import serialise
from edgeopt.program import graph
program = serialise.load(Path(sys.argv[1]) / "cache")
given = np.load(Path(sys.argv[1]) / "in.npz")
np.savez(Path(sys.argv[1]) / "out.npz", *graph.run(program, {k: given[k] for k in given.files}).values())
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)
    found = np.load(tmp_path / "out.npz")
    for key, wanted in zip(found.files, answers(models.eager(name), inputs), strict=True):
        np.testing.assert_allclose(found[key], wanted, atol=1e-5)
    again = serialise.load(tmp_path / "cache")
    assert_equal_to_eager(run_graph(again), again, models.eager(name))
    assert [p.name for p in parts_of(again.module)] == [p.name for p in parts_of(program.module)]


def test_an_operator_has_the_same_name_in_every_process(models):
    """Python orders sets by a hash that is another one in each process."""
    program = models.program("plain rnn")
    code = (
        "import sys; from pathlib import Path; from edgeopt.program.parts import parts_of; "
        "from tests.capture.mixed import Captured; "
        "print(*(p.name for p in parts_of(Captured(Path(sys.argv[1])).program('plain rnn').module)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(models.folder("plain rnn").parent)],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.stdout.split() == [part.name for part in parts_of(program.module)]


def test_two_programs_with_parts_of_one_class_and_other_weights_are_not_confused(tmp_path):
    code = MODELS["crnn"].code
    inputs, axes = MODELS["crnn"].inputs, MODELS["crnn"].axes
    first = captured(tmp_path / "a", code, inputs, axes)
    second = captured(tmp_path / "b", code.replace("manual_seed(3)", "manual_seed(4)"), inputs, axes)
    names = [parts_of(program.module)[0].name for program in (first, second)]
    assert names[0] != names[1]
    assert_equal_to_eager(run_graph(first), first, eager(tmp_path / "a"))
    assert_equal_to_eager(run_graph(second), second, eager(tmp_path / "b"))


MASKED = (
    BACKBONE
    + """
class Positive(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return x[x > 0]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.positive = backbone(), Positive()
    def forward(self, x):
        return self.positive(self.backbone(x))
"""
)
WRITES = (
    BACKBONE
    + """
class Halve(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x[0] = x[0] / 2
        return x * 1
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.halve = backbone(), Halve()
    def forward(self, x):
        y = self.backbone(x)
        z = self.halve(y)
        return y, z
"""
)
ALIAS = BACKBONE + """
class Maybe(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return x - 1
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.maybe = backbone(), Maybe()
    def forward(self, x):
        y = self.backbone(x)
        z = self.maybe(y)
        z.add_(10)
        return y, z
"""  # fmt: skip
OWN_FORWARD = (
    BACKBONE
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
    def forward(self, x):
        y = self.backbone(x)
        if y.sum() > 0:
            return y * 2
        return y - 1
"""
)
WHOLE = (
    BRANCH
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = Branch()
    def forward(self, x):
        return self.branch(x)
"""
)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (MASKED, "'positive' cannot be a scripted part: the size 0 of its output 0 is no line"),
        (WRITES, "'halve' cannot be a scripted part: it writes to the tensors that it is given"),
        (ALIAS, "differs from eager"),
        (OWN_FORWARD, "it is in the model's own forward"),
        (WHOLE, "the scripted part would be the whole model"),
    ],
    ids=[
        "a size that depends on data",
        "writes to its input",
        "a view that is written to",
        "the model's own forward",
        "nothing around it",
    ],
)
def test_what_no_part_can_be_made_of_is_scripted_as_a_whole_and_says_why(tmp_path, code, reason):
    program = captured(tmp_path, code, IMAGE, N)
    assert isinstance(program, ScriptGraph) and program.how == "script"
    assert any("with scripted parts" in note and reason in note for note in program.notes), program.notes
    for inputs in feeds(program):
        for got, wanted in zip(
            graph.run_script(program, inputs).values(), answers(eager(tmp_path), inputs), strict=True
        ):
            np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_write_on_a_branch_that_no_probe_takes_is_seen(tmp_path):
    code = WRITES.replace("x.sum() > 0", "x.sum() > 1e6")
    program = captured(tmp_path, code, IMAGE, N)
    assert any("it may write to the tensors" in note for note in program.notes), program.notes


def test_a_size_that_the_values_choose_is_seen_though_every_call_had_the_same(tmp_path):
    code = MASKED.replace("x[x > 0]", "x[:1] if x.sum() < 100 else x[:0]")
    program = captured(tmp_path, code, {"x": {"shape": ["N", 3, 8, 8], "values": [0.0, 1e3]}}, N)
    assert isinstance(program, ScriptGraph)
    assert any("its output 0 depends on values" in note for note in program.notes), program.notes


def test_hooks_are_not_run_twice(tmp_path):
    code = ROWS + BACKBONE + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.rows = backbone(), Rows()
        self.rows.register_forward_hook(lambda module, args, output: output + 1)
    def forward(self, x):
        return self.rows(self.backbone(x).mean((2, 3)))
"""  # fmt: skip
    with pytest.raises(CaptureError, match="'rows' cannot be a scripted part: it has hooks"):  # nor can the whole
        captured(tmp_path, code, IMAGE, N)


def call(x: tuple[int, ...], y: tuple[int, ...]) -> Recorded:
    return Recorded(inputs=(torch.zeros(x),), outputs=(torch.zeros(y),))


def test_sizes_are_constants_sizes_of_inputs_or_lines_that_three_sizes_prove():
    line = [call((t, 3), (2 * t + 1, 3)) for t in (1, 2, 5)]
    assert outputs_of(line)[0].shape == (Size(0, 0, 2, 1), Size(0, 0, 0, 3))
    same = [call((t, b), (b, t)) for t, b in ((1, 2), (4, 2), (4, 5))]
    assert outputs_of(same)[0].shape == (Size(0, 1, 1, 0), Size(0, 0, 1, 0))
    with pytest.raises(Declined, match="no line"):
        outputs_of([call((t,), (2 * t,)) for t in (1, 2)])  # a line through two points proves nothing
    with pytest.raises(Declined, match="no line"):
        outputs_of([call((t,), (t * t,)) for t in (1, 2, 3)])
    with pytest.raises(Declined, match="no line"):
        outputs_of([call((4,), (n,)) for n in (1, 2, 3)])


def test_a_size_beyond_what_was_proved_is_an_error_and_no_wrong_answer(tmp_path):
    code = ROWS.replace("torch.stack(out)", "torch.stack(out[:30])") + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = Rows()
    def forward(self, x):
        y = self.rows(x + 1)
        return y.reshape(y.shape[0], -1)
"""  # fmt: skip
    program = captured(tmp_path, code, STEPS, NT)
    with pytest.raises(ModelError, match="'rows' gives a tensor of \\[30, 9, 6\\]"):
        graph.run(program, {"x": np.ones((40, 9, 6), np.float32)})


def test_gradients_pass_through_a_part_and_none_goes_to_its_weights(models):
    program = models.program("crnn")
    module, user = program.module, models.eager("crnn")
    x = torch.randn(3, 1, 8, 10)
    own = dict(module.named_parameters())
    assert all(name in dict(user.named_parameters()) for name in own)
    (module(x)[0] ** 2).sum().backward()
    (user(x) ** 2).sum().backward()
    for name, value in own.items():
        torch.testing.assert_close(value.grad, dict(user.named_parameters())[name].grad, atol=1e-4, rtol=1e-4)
    part = parts_of(module)[0]
    assert all(value.grad is None for value in part.module.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_part_follows_float64_and_refuses_other_types(models, name):
    program = models.program(name)
    inputs = feeds(program)[3]
    wide = graph.copied(program.module).double()
    user = models.eager(name)
    if not any(isinstance(m, torch.jit.ScriptModule) for m in user.modules()):
        made_in_float32 = "torch.zeros(x.shape[1], 3)" in MODELS[name].code
        if not made_in_float32:
            wanted = answers(user.double(), {k: v.astype(np.float64) for k, v in inputs.items()})
            with torch.no_grad():
                got = wide(*(torch.from_numpy(inputs[n]).double() for n in program.signature.input_names))
            for value, want in zip(got, wanted, strict=True):
                np.testing.assert_allclose(value.numpy(), want, atol=1e-12)
    node = next(n for n in program.module.graph.nodes if part_of(n))
    part = part_of(node)
    with pytest.raises(ModelError, match=f"'{part.label}' takes float32 and was given float16"):
        node.target(*(t.half() if t.is_floating_point() else t for t in part.examples[0]))


def test_what_a_part_gives_shares_no_memory_with_what_it_takes(models):
    program = models.program("gives what it takes")
    node = next(n for n in program.module.graph.nodes if part_of(n))
    x = torch.ones(2, 4, 6, 6)
    assert torch.equal(node.target(x), x) and node.target(x).data_ptr() != x.data_ptr()


def test_the_size_of_a_program_counts_the_weights_inside_its_parts(models):
    program = models.program("crnn")
    rnn = models.eager("crnn").rnn
    assert isinstance(rnn, nn.LSTM)
    assert size_bytes(program.module) == sum(p.numel() * 4 for p in rnn.parameters())


def test_a_recurrent_layer_over_a_fixed_length_needs_no_part(tmp_path):
    program = captured(tmp_path, MODELS["plain rnn"].code, {"x": {"shape": [4, "N", 6]}}, N)
    assert isinstance(program, ExportedGraph) and not parts_of(program.module)
