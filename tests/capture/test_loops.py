"""Loops with a fixed number of rounds: torch unrolls them when it freezes a script, so that no pass of ours has to."""

from __future__ import annotations

import collections
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edgeopt.backends import onnx_export, torchscript
from edgeopt.capture import capture
from edgeopt.program import ScriptGraph
from edgeopt.progress import SILENT
from edgeopt.spec.project import project_for_model

_LOAD = "import sys, torch; print(torch.jit.load(sys.argv[1])(torch.ones(2, 4))[0].sum().item())"


class Rounds(nn.Module):
    def __init__(self, rounds: int):
        super().__init__()
        self.layer, self.rounds = nn.Linear(4, 4), rounds

    def forward(self, x):
        for i in range(self.rounds):
            if bool(x.sum() > 1e6):
                x = x * 0.5
            x = torch.tanh(self.layer(x)) + i / 100
        return x


def loops(block) -> int:
    return sum((n.kind() == "prim::Loop") + sum(loops(b) for b in n.blocks()) for n in block.nodes())


@pytest.fixture(params=[3, 40])
def scripted(request, tmp_path):
    torch.manual_seed(0)
    script = torch.jit.script(Rounds(request.param).eval())
    torch.jit.save(script, str(tmp_path / "rounds.pt"))
    inputs = {"x": {"shape": ["N", 4], "dtype": "float32"}}
    project = project_for_model("rounds.pt", folder=tmp_path, inputs=inputs, axes={"N": {"min": 1, "opt": 2, "max": 4}})
    program = capture(project, progress=SILENT)
    assert isinstance(program, ScriptGraph)
    return script, program


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fixed_number_of_rounds_is_unrolled(scripted, tmp_path):
    script, program = scripted
    before, after = loops(script.inlined_graph), loops(program.module.graph)
    assert before == 1 and (after == 0 if script.rounds <= 8 else after <= 2)
    path = tmp_path / "float.pt"
    torchscript.save(program, path)
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOAD, path], capture_output=True, text=True, check=True
    )
    np.testing.assert_allclose(float(said.stdout), script(torch.ones(2, 4)).sum().item(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_loop_is_in_the_onnx_file(scripted, tmp_path):
    _, program = scripted
    file = onnx_export.write(program, tmp_path, opset_max=17)
    written = collections.Counter(node.op_type for node in onnx.load(tmp_path / file.name).graph.node)
    assert written["Loop"] == 0 and written["Tanh"] > 1
