"""Case C08: a device that was captured on the CPU is no literal in the files; tensors are made where the inputs lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeopt.backends import onnx_export, torchscript
from edgeopt.onboard import ort
from edgeopt.program import ScriptGraph, devices, graph
from edgeopt.spec.profile import load_profile
from tests.capture.support import captured, run

BRANCH = "if bool(x.sum() > 0):\n                y = y * 2\n            return y"
INPUTS = {"x": {"shape": ["N", 3], "values": [-1.0, 1.0]}}
AXES = {"N": {"min": 1, "opt": 2, "max": 6}}
MAKERS = {
    "the input's": "torch.arange(x.shape[0], device=x.device)[:, None] + x",
    "a literal": "torch.zeros(x.shape[0], 3, device='cpu') + x",
    "a device": "torch.full((x.shape[0], 3), 2.0, device=torch.device('cpu')) + x",
    "the default": "torch.ones(x.shape[0], 3) + x",
    "cpu()": "torch.zeros_like(x).cpu() + x",
    "to": "(x * 3).to('cpu') + x",
    "to with a dtype": "(x * 3).to('cpu', torch.float64).to(torch.float32) + x",
    "eye": "torch.eye(x.shape[0]) @ x",
    "linspace": "torch.linspace(0, 1, x.shape[0])[:, None] + x",
    "new_zeros": "x.new_zeros(x.shape[0], 3) + x",
    "of another tensor's size": "torch.zeros(x.shape) + x",
}


def model(expression: str, branch: bool) -> str:
    tail = BRANCH if branch else "return y"
    return f"""
    class Model(nn.Module):
        def forward(self, x):
            y = {expression}
            {tail}
    """


def reloaded(program, path) -> torch.jit.ScriptModule:
    torchscript.save(program, path)
    return torch.jit.load(str(path))


@pytest.mark.parametrize("branch", [False, True], ids=["straight", "branch"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensors_are_made_where_the_inputs_lie(tmp_path, maker, branch):
    """`meta` stands for a GPU: a tensor of the CPU beside it is refused there too."""
    program = captured(tmp_path, model(MAKERS[maker], branch), INPUTS, AXES)
    file = reloaded(program, tmp_path / "float.pt")
    assert devices.literals(file.graph) == []
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    torch.testing.assert_close(file(x)[0], torch.from_numpy(run_any(program, x.numpy())))
    if not branch:  # a branch on values needs values
        assert file(x.to("meta"))[0].device.type == "meta"


def run_any(program, x: np.ndarray) -> np.ndarray:
    (name,) = program.signature.output_names
    return graph.run(program, {"x": x})[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_program_follows_its_inputs(tmp_path):
    """The recipe of the case, as torch.jit.trace takes it."""
    from edgeopt.capture import arguments, eager, script

    class Ramp(torch.nn.Module):
        def forward(self, x):
            return x + torch.arange(x.shape[0], device=x.device)[:, None] + torch.zeros(3, device="cpu").cpu()

    signature = captured(tmp_path, model("x", False), INPUTS, AXES).signature
    given = eager.Eager(Ramp(), signature.inputs, tmp_path, arguments.Arguments(("x",)))
    program = script.trace(given, signature, copy_inputs=False, seed=0)
    assert devices.literals(program.module.graph) == []
    x = np.ones((5, 3), np.float32)
    np.testing.assert_array_equal(run(program, x=x)["output"], x + np.arange(5, dtype=np.float32)[:, None])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_branch_makes_its_tensors_where_the_inputs_lie(tmp_path):
    """The branch here depends on a size, so that it runs on `meta`."""
    code = """
    class Model(nn.Module):
        def forward(self, x):
            out = torch.zeros(x.shape[0], 3)
            for i in range(x.shape[0]):
                if i % 2 == 0:
                    out[i] = x[i] + torch.arange(3, device=x.device)
            return out
    """
    program = captured(tmp_path, code, INPUTS, {"N": {"min": 1, "opt": 3, "max": 40}})
    file = reloaded(program, tmp_path / "float.pt")
    assert devices.literals(file.graph) == []
    assert file(torch.ones(5, 3, device="meta"))[0].device.type == "meta"
    got = run(program, x=np.ones((5, 3), np.float32))["output"]
    np.testing.assert_array_equal(got, [[1, 2, 3], [0, 0, 0], [1, 2, 3], [0, 0, 0], [1, 2, 3]])


def moved_to(value: torch._C.Value) -> str:
    """What gives the device of the last move on the tensor's way from the inputs, which is along first arguments."""
    node = value.node()
    while node.kind() != "prim::Param":
        for given in node.inputs():
            if isinstance(given.type(), torch._C.DeviceObjType):
                return str(given.node()).partition(" = ")[2].partition("()")[0]
        node = node.inputsAt(0).node()
    return "where it was given"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_an_operator_needs_on_the_cpu_stays_there(tmp_path):
    """pack_padded_sequence takes its lengths on the CPU only, wherever the rest lies."""
    code = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
            return out
    """
    inputs = {
        "x": {"shape": ["N", 5, 3]}, "lengths": {"shape": ["N"], "dtype": "int64", "values": [1, 5]},
    }  # fmt: skip
    program = captured(tmp_path, code, inputs, {"N": {"min": 1, "opt": 2, "max": 4}})
    assert isinstance(program, ScriptGraph) and devices.literals(program.module.graph) == []
    (pack,) = (node for node in program.module.graph.nodes() if node.kind() == "aten::_pack_padded_sequence")
    data, lengths = pack.inputsAt(0), pack.inputsAt(1)
    assert moved_to(lengths) == 'prim::Constant[value="cpu"]' and moved_to(data) == "where it was given"
    lengths = np.array([3, 5, 1])
    x = np.random.default_rng(0).normal(size=(3, 5, 3)).astype(np.float32)
    got = run(program, x=x, lengths=lengths)["output"]
    assert all(not got[i, n:].any() and got[i, :n].all() for i, n in enumerate(lengths))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_literal_that_is_left_is_refused_for_a_target_with_a_gpu(tmp_path):
    class Fixed(torch.nn.Module):
        def forward(self, x):
            return (x + torch.zeros(x.shape[0], 3, device="cpu"),)

    program = captured(tmp_path, model("x * 2", True), INPUTS, AXES)
    module = torch.jit.freeze(torch.jit.trace(Fixed().eval(), torch.ones(2, 3)))
    fixed = ScriptGraph(program.signature, program.reference, module=module)
    lowered = torchscript.lower(fixed, load_profile("desktop-cuda"), tmp_path)
    assert not lowered.files and "literal device" in lowered.refused[0].reason
    assert "test_devices.py" in lowered.refused[0].reason
    for profile in ("desktop-cuda", "x86-cpu"):
        reasons = [r.reason for r in torchscript.lower(program, load_profile(profile), tmp_path).refused]
        assert not any("literal device" in reason for reason in reasons)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_older_onnx_exporter_takes_devices_that_follow(tmp_path):
    program = captured(tmp_path, model(MAKERS["the input's"], True), INPUTS, AXES)
    onnx_export.write(program, tmp_path, opset_max=17)
    spec = [s.model_dump(mode="json") for s in program.signature.inputs]
    out = [s.model_dump(mode="json") for s in program.signature.outputs]
    opened = ort.open_program(str(tmp_path), {"file": "float.onnx"}, spec, out, [], None)
    for sign in (1, -1):
        x = sign * np.ones((5, 3), np.float32)
        np.testing.assert_allclose(opened.call([x])[0], run_any(program, x))
