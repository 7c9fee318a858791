"""Graphs as lines of text: the same for the same graph, and few lines apart after a small change."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edgeopt.capture import serialise
from edgeopt.program import onnx_text, script_text, text
from edgeopt.program.difference import unified
from tests.passes.support import optimized, program
from tests.program import networks


@pytest.mark.parametrize("make", [networks.residual, networks.block, networks.views, networks.branches])
def test_the_lines_are_the_same_after_the_graph_is_exported_again(make, tmp_path):
    given = make()
    serialise.save(given, tmp_path / "saved")
    assert text.lines(serialise.load(tmp_path / "saved")) == text.lines(given)


def test_a_line_names_module_operator_shape_arguments_and_weights():
    lines = text.lines(networks.residual())
    assert lines[0] == "input x0 f32[N, 3, 32, 32]"
    assert lines[1] == (
        "inner.stem.0:conv2d f32[N, 8, 16, 16] = "
        "conv2d(x0, inner.stem.0.weight f32[8, 3, 3, 3], stride=[2, 2], padding=[1, 1])"
    )
    assert lines[-1] == "output y0 = inner.head:linear"


def test_sizes_are_named_after_axes_and_items_stand_where_they_are_read():
    class Net(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2, dim=1)
            return torch.cat([a * b, a]).flatten(1)

    lines = text.lines(program(Net(), ("N", 6, 4)))
    assert lines[2].endswith("= mul(inner:chunk[0], inner:chunk[1])")
    assert "f32[2*N, 3, 4]" in lines[3] and "cat([inner:mul, inner:chunk[0]])" in lines[3]
    assert "f32[2*N, 12]" in lines[4]
    assert not any("sym_size" in line for line in lines)


def test_folding_batch_norm_changes_few_lines():
    given = networks.residual()
    before, after = text.lines(given), text.lines(optimized(given)[0])
    removed = [line for line in unified(before, after, "a", "b") if line.startswith("-")][1:]
    assert len(removed) == 4 + 4 + 3 + 1  # convolutions, batch norms, their readers in place, the skip
    assert sum("batch_norm(" in line for line in removed) == 4


def test_one_operator_less_in_a_module_leaves_the_others_their_names():
    class Net(nn.Module):
        def __init__(self, extra):
            super().__init__()
            self.first, self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
            self.extra = extra

        def forward(self, x):
            x = self.first(x)
            return self.second(x.relu() if self.extra else x)

    with_it, without = (text.lines(program(Net(extra), ("N", 4))) for extra in (True, False))
    lines = [line[0] for line in unified(with_it, without, "a", "b")[2:]]
    assert lines.count("-") == 2 and lines.count("+") == 1


def test_no_difference_is_no_line_and_pairs_stand_together():
    assert unified(["a = 1", "b = 2"], ["a = 1", "b = 2"], "x", "y") == ()
    found = unified(["a = 1", "b = 2", "c = 3"], ["a = 9", "b = 8", "d = 7"], "x", "y")
    assert found == ("--- x", "+++ y", "@@ -1,3 +1,3 @@", "-a = 1", "+a = 9", "-b = 2", "+b = 8", "-c = 3", "+d = 7")


def test_the_difference_is_one_that_patch_takes(tmp_path):
    import shutil
    import subprocess

    from tests.conftest import absent

    if shutil.which("patch") is None:
        absent("the program patch is not installed")
    before = [f"line{i} = {i}" for i in range(40)]
    after = [line if i % 7 else f"line{i} = new" for i, line in enumerate(before) if i not in (5, 20)] + ["last = 1"]
    (tmp_path / "graph").write_text("\n".join(before) + "\n")
    diff = "\n".join(unified(before, after, "graph", "graph")) + "\n"
    subprocess.run(["patch", "--silent", "graph"], input=diff, text=True, cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "graph").read_text().splitlines() == after


def onnx_net(*, quantized: bool = False, names: str = "v") -> onnx.ModelProto:
    """x -> MatMul -> Relu, its input through Q/DQ where `quantized`; `names` is what values are called."""
    weight = numpy_helper.from_array(np.ones((4, 2000), np.float32), "layer.weight")
    scale, zero = numpy_helper.from_array(np.float32(0.5), "s"), numpy_helper.from_array(np.uint8(3), "z")
    nodes, given = [], "x"
    if quantized:
        nodes += [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], [f"{names}q"]),
            helper.make_node("DequantizeLinear", [f"{names}q", "s", "z"], [f"{names}d"]),
        ]
        given = f"{names}d"
    nodes.append(helper.make_node("MatMul", [given, "layer.weight"], [f"{names}m"]))
    nodes.append(helper.make_node("Relu", [f"{names}m"], ["y"]))
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2000])], [weight, scale, zero],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_onnx_lines_do_not_depend_on_what_an_exporter_called_its_values():
    assert onnx_text.lines(onnx_net(names="a")) == onnx_text.lines(onnx_net(names="zzz")) == (
        "input x f32[n, 4]",
        "MatMul f32[n, 2000] = MatMul(x, layer.weight f32[4, 2000])",
        "Relu f32[n, 2000] = Relu(MatMul)",
        "output y = Relu",
    )  # fmt: skip


def test_quantizing_an_onnx_graph_changes_the_lines_that_read_it():
    found = unified(onnx_text.lines(onnx_net()), onnx_text.lines(onnx_net(quantized=True)), "float", "int8")
    assert [line for line in found if line[0] in "+-"][2:] == [
        "+QuantizeLinear u8[n, 4] = QuantizeLinear(x, f32(0.5), u8(3))",
        "-MatMul f32[n, 2000] = MatMul(x, layer.weight f32[4, 2000])",
        "+MatMul f32[n, 2000] = MatMul(real(QuantizeLinear, f32(0.5), u8(3)), layer.weight f32[4, 2000])",
    ]


def test_a_torchscript_graph_shows_its_loops_and_does_not_count_the_process():
    class Loop(nn.Module):
        def forward(self, x):
            for _ in range(int(x.shape[0])):
                x = x * 2 + 1
            return x

    module = torch.jit.script(Loop().eval())
    lines = script_text.lines(module)
    assert any("prim::Loop" in line for line in lines)
    assert any(line.startswith("    ") and "mul(" in line for line in lines)
    assert script_text.lines(torch.jit.script(Loop().eval())) == lines
    assert script_text.operators(module)["mul"] == 1
