"""Operators of the user's own in TorchScript: their libraries are loaded where the file is, or it is refused."""

from __future__ import annotations

import pytest

from edgeopt.backends import onnx_export, torchscript
from edgeopt.errors import LoweringError
from edgeopt.spec.profile import load_profile
from tests.backends.custom_op_models import AXES, HERE, INPUTS, OTHER, PROFILES, program_of
from tests.capture.support import captured
from tests.native import torch_library


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
