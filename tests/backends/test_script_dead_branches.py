"""A script keeps branches that it never takes, with operators that an older torch does not know; the file has none."""

from __future__ import annotations

import re
import zipfile

import pytest
import torch

from edgeopt.backends import torchscript
from edgeopt.program import ScriptGraph
from tests.capture.support import captured

LOOPING = """
class Model(nn.Module):
    def forward(self, x):
        while x.sum() > 100.0:
            x = x / 2.0
        for _ in range(2):
            x = F.interpolate(x, scale_factor=2.0, mode="{mode}"{more})
        return x
"""
# came after torch 2.1: functional.interpolate of torch 2.11 and later names them in a branch for each mode
NEWER = {"_upsample_lanczos2d_aa"}


def operators(path) -> set[str]:
    with zipfile.ZipFile(path) as file:
        code = "".join(
            file.read(name).decode() for name in file.namelist() if "/code/" in name and name.endswith(".py")
        )
    return set(re.findall(r"torch\.(\w+)\(", code))


@pytest.mark.parametrize("mode, more", [("nearest", ""), ("bilinear", ", align_corners=False"), ("bicubic", "")])
def test_no_operator_of_a_branch_that_is_never_taken_is_in_the_file(tmp_path, mode, more):
    code = LOOPING.format(mode=mode, more=more)
    program = captured(tmp_path, code, {"x": {"shape": ["n", 3, 4, 4]}}, {"n": {"min": 1, "opt": 1, "max": 4}})
    assert isinstance(program, ScriptGraph) and program.how == "script"
    torchscript.save(program, tmp_path / "float.pt")
    found = operators(tmp_path / "float.pt")
    assert f"upsample_{mode}2d" in found and not found & NEWER


def test_torch_itself_leaves_them_in_a_script_that_is_not_frozen(tmp_path):
    """What the test above is about: without freezing the old torch refuses the file ('Unknown builtin op')."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")

    torch.jit.save(torch.jit.script(Model()), str(tmp_path / "raw.pt"))
    assert operators(tmp_path / "raw.pt") & NEWER or "_upsample_bilinear2d_aa" in operators(tmp_path / "raw.pt")
