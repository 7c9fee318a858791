"""A tiny artifact made by hand: a float MLP as ONNX and as TorchScript, with reference and labelled cases.

The network is y = relu(x W1 + b1) W2 + b2 with x (n, 4) and y (n, 3), n from 1 to 8. Weights and inputs come
from a fixed seed, and the reference is computed by numpy in float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeopt import digest
from edgeopt.runtime.artifact import Artifact, publish
from edgeopt.runtime.tensors import PackWriter
from edgeopt.runtime.zipapp import write_zipapp
from edgeopt.spec.manifest import Axis, Candidate, Feed, File, Manifest, TensorSpec, Tolerance

INPUTS = (TensorSpec(name="x", dtype="float32", shape=("n", 4)),)
OUTPUTS = (TensorSpec(name="output", dtype="float32", shape=("n", 3)),)
AXES = {"n": Axis(min=1, opt=2, max=8)}
CASES = 4  # recorded calls of two samples each


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = {"W1": (4, 8), "b1": (8,), "W2": (8, 3), "b2": (3,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def expected(x: np.ndarray) -> np.ndarray:
    """What the network gives for x (n, 4), computed in float64: float32 (n, 3)."""
    w = {name: value.astype(np.float64) for name, value in weights().items()}
    hidden = np.maximum(x.astype(np.float64) @ w["W1"] + w["b1"], 0)
    return (hidden @ w["W2"] + w["b2"]).astype(np.float32)


def case_inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    return [rng.normal(size=(2, 4)).astype(np.float32) for _ in range(CASES)]


def evaluate(predict) -> dict[str, float]:
    """Top-1 agreement with the network's own labels: 1.0 for a faithful candidate."""
    right = total = 0
    for x in case_inputs():
        labels = expected(x).argmax(axis=1)
        right += int((predict({"x": x})["output"].argmax(axis=1) == labels).sum())
        total += len(labels)
    return {"accuracy": right / total}


def onnx_model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gemm", ["x", "W1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "W2", "b2"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes, "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights().items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    onnx.checker.check_model(model, full_check=True)
    return model


def write_torchscript(path: Path) -> None:
    import warnings

    import torch

    w = {name: torch.from_numpy(value) for name, value in weights().items()}

    class Network(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x @ w["W1"] + w["b1"]) @ w["W2"] + w["b2"]

    with warnings.catch_warnings():  # torch 2.13 calls TorchScript deprecated; the devices have nothing else
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(Network().eval(), torch.zeros(2, 4))
        torch.jit.save(torch.jit.freeze(traced), str(path))


def tiny_artifact(
    folder: Path | str,
    *,
    torchscript: bool = True,
    name: str = "tiny",
    extra: dict[str, bytes] | None = None,
    **changes,
) -> Artifact:
    """The artifact `folder`/NAME.edgeopt, candidates 'onnxruntime-fp32' and 'torchscript-fp32'.

    `torchscript=False` leaves the second out and does not import torch. `extra` are further files by name,
    `changes` replace fields of the manifest.
    """
    staging = Path(folder) / f".{name}.staging"
    staging.mkdir(parents=True)
    onnx.save(onnx_model(), staging / "float.onnx")
    candidates = [candidate("onnxruntime-fp32", "onnxruntime", "float.onnx", opset=13)]
    if torchscript:
        write_torchscript(staging / "float.pt")
        candidates.append(candidate("torchscript-fp32", "torchscript", "float.pt"))
    write_zipapp(staging)
    for file, data in (extra or {}).items():
        (staging / file).write_bytes(data)
    reference = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    fields = {
        "name": name, "profile": "x86-cpu", "target": {"kind": "cpu", "arch": "x86_64"},
        "inputs": INPUTS, "outputs": OUTPUTS, "axes": AXES,
        "output_structure": {"kind": "tensor", "index": 0},
        "candidates": candidates,
        "reference": _feeds(staging, "reference", [reference]),
        "cases": _feeds(staging, "cases", case_inputs()), "cases_complete": True,
        "metrics": {"reference": {"accuracy": 1.0}},
    }  # fmt: skip
    fields.update(changes)
    manifest = Manifest(files=hash_files(staging), **fields)
    return publish(staging, Path(folder) / f"{name}.edgeopt", manifest)


def candidate(name: str, runtime: str, file: str, **fields) -> Candidate:
    tolerance = Tolerance(sqnr_db=60, max_abs=1e-4)
    given = {"precision": "fp32", "tolerance": tolerance, **fields}
    return Candidate(name=name, runtime=runtime, file=file, **given)


def hash_files(folder: Path) -> dict[str, File]:
    """Every file below `folder` as a manifest lists it."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): File(sha256=digest.of_file(p), size=p.stat().st_size) for p in paths}


def _feeds(staging: Path, kind: str, inputs: list[np.ndarray]) -> tuple[Feed, ...]:
    with PackWriter(staging / kind / "tensors.bin", f"{kind}/tensors.bin") as pack:
        return tuple(Feed(inputs={"x": pack.add(x)}, outputs={"output": pack.add(expected(x))}) for x in inputs)
