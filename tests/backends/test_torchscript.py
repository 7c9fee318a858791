"""TorchScript files: they load elsewhere and equal the program, and hold nothing of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edgeopt.backends import onnx_export, script_file, script_reload, script_source, torchscript
from edgeopt.errors import LoweringError, SpaceError
from edgeopt.program import ScriptGraph, graph
from tests.backends.programs import case as make_case

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def load(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path))


def error(made, path, **sizes):
    inputs = made.inputs(**sizes)
    found = load(path)(*graph.to_tensors(made.program.signature, inputs))
    return max(float(np.abs(a - b.numpy()).max()) for a, b in zip(made.expected(inputs), found, strict=True))


def code(path):
    with zipfile.ZipFile(path) as archive:
        return "".join(archive.read(n).decode() for n in archive.namelist() if n.endswith(".py"))


@pytest.fixture(scope="module")
def saved(case, tmp_path_factory):
    """saved(NAME): the file of that program."""
    folder = tmp_path_factory.mktemp("saved")

    def save(name):
        path = folder / name / "float.pt"
        if not path.exists():
            path.parent.mkdir()
            torchscript.save(case(name).program, path)
        return path

    return save


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("residual", {"batch": 5}),
        ("transformer", {"batch": 3, "time": 11}),
        ("resizing", {"batch": 3, "h": 17}),
    ],
)
def test_the_file_equals_the_eager_module_at_other_sizes(case, saved, name, sizes):
    assert error(case(name), saved(name), **sizes) < 1e-5


def test_lowering_names_the_candidate_with_the_profiles_flags(case, profile, tmp_path):
    lowered = torchscript.lower(case("residual").program, profile("x86-cpu"), tmp_path)
    assert lowered.files == ("float.pt",) and lowered.refused == ()
    (candidate,) = lowered.candidates
    assert (candidate.name, candidate.runtime, candidate.precision) == ("torchscript-fp32", "torchscript", "fp32")
    assert candidate.flags == profile("x86-cpu").fuser_flags
    assert candidate.flags["optimize_for_inference"] is True  # by the runner, after loading


def test_the_file_is_frozen_and_not_optimised_for_one_machine(saved):  # case G06
    text = code(saved("residual"))
    assert text.count("torch.conv2d") == 3
    assert "mkldnn" not in text and "self." not in text.split("def forward", 1)[1]


def test_nothing_of_this_machine_is_in_the_file(saved):
    for name in ("residual", "transformer"):
        with zipfile.ZipFile(saved(name)) as archive:
            assert not [n for n in archive.namelist() if n.endswith(".debug_pkl")]
            assert {info.date_time[0] for info in archive.infolist()} == {1980}
        data = saved(name).read_bytes()
        for word in (b"/usr", b"/root", b"/home", b"/tmp", b"site-packages"):
            assert word not in data


def test_the_same_bytes_whatever_was_compiled_before(case, saved, tmp_path):
    torchscript.frozen(case("transformer").program)
    torchscript.save(case("residual").program, tmp_path / "float.pt")
    assert (tmp_path / "float.pt").read_bytes() == saved("residual").read_bytes()


def test_integer_programs_and_unknown_targets_are_refused(case, profile, tmp_path):
    (refused,) = torchscript.lower(case("integer").program, profile("x86-cpu"), tmp_path).refused
    assert refused.candidate == "torchscript-int8" and "Q/DQ" in refused.reason
    (refused,) = torchscript.lower(case("residual").program, profile("xavier"), tmp_path).refused
    assert "torch 1.11 to 2.1" in refused.reason and "interpreter" in refused.reason
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_with_another_torch_than_the_targets_proves_nothing(case, profile, tmp_path):
    program = case("residual").program
    lowered = torchscript.lower(program, profile("xavier"), tmp_path, target_python=sys.executable)
    assert lowered.candidates == ()
    here = torch.__version__.split("+")[0]
    assert here in lowered.refused[0].reason and "1.11 to 2.1" in lowered.refused[0].reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_an_interpreter_that_fails_is_named(case, saved, python):
    with pytest.raises(LoweringError, match=f"with {python}"):
        script_reload.check(case("residual").program, saved("residual"), python=python)


def test_a_file_of_another_program_is_found_on_loading(case, saved):
    program = case("residual").program
    weights = [p for p in program.module.parameters()]
    changed = dataclasses.replace(program, module=_doubled(program.module))
    assert weights[0] is next(program.module.parameters())
    with pytest.raises(LoweringError, match="on the reference inputs: output 'logits'"):
        script_reload.check(changed, saved("residual"), python=sys.executable)


def _doubled(module):
    import copy

    module = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    return module


class Greek(torch.nn.Module):
    def forward(self, x_θ):
        größe = x_θ * 2
        if größe.sum() > 0:
            größe = größe + 1
        return (größe,)


class Attribute(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("größe", torch.ones(4))

    def forward(self, x):
        return (x * self.größe,)


def scripted(module):
    """The module as a ScriptGraph of one input x [4], not frozen."""
    made = make_case(torch.nn.Identity(), {"x": ("float32", 4)}, {"y": ("float32", 4)})
    module = torch.jit.script(module.eval())
    return ScriptGraph(signature=made.program.signature, reference=(), module=module, how="script")


def test_names_outside_ascii_are_renamed(tmp_path):  # case G07
    program = scripted(Greek())
    torchscript.save(program, tmp_path / "float.pt")
    assert code(tmp_path / "float.pt").isascii()
    assert load(tmp_path / "float.pt")(torch.tensor([1.0, 2, 3, 4]))[0].tolist() == [3, 5, 7, 9]
    torchscript.save(program, tmp_path / "模型 θ.pt")  # a path may hold anything
    assert load(tmp_path / "模型 θ.pt")(torch.ones(4))[0].tolist() == [3, 3, 3, 3]
    assert "x_θ" in str(program.module.graph)  # the user's module stays as it is


def test_an_attribute_outside_ascii_is_refused_by_name(tmp_path):
    with pytest.raises(LoweringError, match="größe"):
        torchscript.save(scripted(Attribute()), tmp_path / "float.pt")
    assert not (tmp_path / "float.pt").exists()


def test_names_of_an_exported_program_are_ours(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x_θ):
            return x_θ * 2

    made = make_case(Model(), {"x_θ": ("float32", 4)}, {"y": ("float32", 4)})
    torchscript.save(made.program, tmp_path / "float.pt")
    assert load(tmp_path / "float.pt")(torch.ones(4))[0].tolist() == [2, 2, 2, 2]


def test_weights_are_stored_contiguous(tmp_path):  # case G08
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.rand(32, 16, 1, 2)[:, :, :, ::2])

        def forward(self, x):
            return F.conv2d(x, self.weight)

    made = make_case(
        Model(), {"x": ("float32", "n", 16, 16, 16)}, {"y": ("float32", "n", 32, 16, 16)}, axes={"n": (1, 2, 64)}
    )
    assert not made.eager.weight.is_contiguous()
    torchscript.save(made.program, tmp_path / "float.pt")
    module = torchscript.scripted(made.program.module)
    assert all(buffer.is_contiguous() for buffer in module.buffers())
    assert error(made, tmp_path / "float.pt", n=64) < 1e-5


class Constants(torch.nn.Module):
    """Each kind of constant and of size arithmetic that the source writer has to print."""

    def forward(self, x):
        n, t = x.shape
        masked = x.masked_fill(torch.ones(n, t, dtype=torch.bool).triu(1), float("-inf"))
        shifted = torch.cat([x[:, 1:], x.new_zeros(n, 1)], 1)
        half = x[:, :3].sum([], keepdim=False) / (t // 2 + t % 3 + 1)
        picked = x[torch.tensor([0, -1]), :]
        return masked.softmax(-1), shifted.to(torch.float64), half * max(n, t), picked.view(-1), x.mean(1, dtype=None)


def test_constants_and_size_arithmetic_are_written_as_source(tmp_path):
    made = make_case(
        Constants(),
        {"x": ("float32", "n", "t")},
        {
            "a": ("float32", "n", "t"), "b": ("float64", "n", "t"), "c": ("float32",),
            "d": ("float32", "dim_0"), "e": ("float32", "n"),
        },
        axes={"n": (2, 3, 9), "t": (4, 6, 20)},
    )  # fmt: skip
    torchscript.save(made.program, tmp_path / "float.pt")
    for n, t in ((2, 4), (5, 9), (9, 20)):
        assert error(made, tmp_path / "float.pt", n=n, t=t) < 1e-5


def test_control_flow_of_an_exported_graph_is_refused_by_name():
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    made = make_case(Model(), {"x": ("float32", 4)}, {"y": ("float32", 4)})
    with pytest.raises(LoweringError, match="control flow"):
        script_source.source(made.program.module)


def test_a_file_is_normalised_once_and_for_all(saved):
    data = saved("residual").read_bytes()
    assert script_file.normalised(data) == data


def test_a_full_disk_is_said_and_leaves_nothing(case):
    with full_disk() as folder:
        with pytest.raises(SpaceError, match="the disk is full"):
            torchscript.save(case("residual").program, folder / "float.pt")
        with pytest.raises(SpaceError, match="the disk is full"):
            onnx_export.write(case("residual").program, folder, opset_max=17)
        assert list(folder.iterdir()) == []


@contextlib.contextmanager
def full_disk():
    """A folder on a tmpfs of 64 KB, half a file of ours."""
    with tempfile.TemporaryDirectory() as name:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", name], capture_output=True, text=True
        )
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)
