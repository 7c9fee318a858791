"""Small ONNX files, as torch's exporter writes them, and as other people's files are."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from edgeopt.capture import onnx_file
from edgeopt.program import OnnxGraph
from edgeopt.spec.project import project_for_model

BATCH = {"batch": {"min": 1, "opt": 2, "max": 16}}


def exported(model: torch.nn.Module, path: Path, *sizes: int, opset: int = 17, training: bool = False) -> Path:
    """`model` of one input `x`, [batch, *sizes], written by torch's older exporter, which names nodes by modules."""
    mode = torch.onnx.TrainingMode.PRESERVE if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # files of other people are written by it
        torch.onnx.export(
            model.eval(), (torch.zeros(2, *sizes),), path, dynamo=False, opset_version=opset, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}}, training=mode,
            do_constant_folding=not training,
        )  # fmt: skip
    return path


def captured(path: Path, *sizes: int, axes=BATCH) -> OnnxGraph:
    shape = ["batch", *sizes] if axes else [2, *sizes]
    return onnx_file.capture(
        project_for_model(path.name, folder=path.parent, inputs={"x": {"shape": shape}}, axes=axes)
    )


def weights(name: str, *shape: int, seed: int = 0, scale: float = 0.3) -> TensorProto:
    value = scale * np.random.default_rng(seed).standard_normal(shape)
    return numpy_helper.from_array(value.astype(np.float32), name)


def written(
    nodes: list, stored: list, path: Path, *, opset: int = 17, shape=("n", 3, 8, 8), out=("n", 2, 8, 8), ir: int = 8
) -> Path:
    """A graph of one input `x` and one output `y`; the shapes are what the file declares, right or wrong."""
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        stored,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    onnx.save(model, path)
    return path
