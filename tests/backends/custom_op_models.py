"""Models with operators of the user's own, and their ONNX files against the program."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import onnxruntime

from edgeopt.program import ExportedGraph, graph
from tests.capture.support import captured

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
