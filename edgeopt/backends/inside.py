"""The values inside a program made visible to a runtime: written as further outputs of the file that it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx
from torch.fx import Node

from edgeopt.backends import onnx_export, torchscript
from edgeopt.program import ExportedGraph, OnnxGraph, Program, intermediate
from edgeopt.program.nodes import module_path, user_line
from edgeopt.spec.manifest import TensorSpec
from edgeopt.spec.profile import Profile

_FLOATS = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.DOUBLE: "float64", onnx.TensorProto.FLOAT16: "float16"}


@dataclass(frozen=True)
class Place:
    """A value inside a program: its name, the operator that gives it, and where that comes from."""

    name: str
    operator: str
    module: str
    line: str | None
    output: str  # its name among the outputs of a program that exposes it


class Inside(Protocol):
    """The places of a program in the order of computation, and the program with some of them as outputs."""

    places: tuple[Place, ...]

    def exposed(self, places: Sequence[Place]) -> Program: ...


def inside(program: Program) -> Inside | None:
    """None for TorchScript, whose values no file shows."""
    if isinstance(program, ExportedGraph):
        return _Graph(program)
    return _Onnx(program) if isinstance(program, OnnxGraph) else None


def write(program: Program, profile: Profile, runtime: str, folder: Path) -> str:
    """The program's file for a runtime, which nothing has compared with the program; its name. Raises LoweringError."""
    if runtime == "torchscript":
        torchscript.save(program, folder / "model.pt")
        return "model.pt"
    onnx_export.write_unproved(program, folder / "model.onnx", opset_max=profile.target.onnx_opset_max)
    return "model.onnx"


class _Graph:
    """Every operator that computes floats from what depends on the inputs."""

    def __init__(self, program: ExportedGraph):
        self._program = program
        self._nodes = {node.name: node for node in _live_floats(program)}
        self.places = tuple(
            Place(n.name, intermediate.operator(n), module_path(n), user_line(n), intermediate.output_name(n))
            for n in self._nodes.values()
        )

    def exposed(self, places: Sequence[Place]) -> Program:
        return intermediate.exposed(self._program, [self._nodes[place.name] for place in places])


def _live_floats(program: ExportedGraph) -> list[Node]:
    live: set[Node] = set()
    for node in program.module.graph.nodes:
        if node.op == "placeholder" or any(source in live for source in node.all_input_nodes):
            live.add(node)
    return [n for n in program.module.graph.nodes if n in live and intermediate.comparable(n) and _is_float(n)]


def _is_float(node: Node) -> bool:
    return node.meta["val"].is_floating_point()


class _Onnx:
    def __init__(self, program: OnnxGraph):
        self._program = program
        inferred = onnx.shape_inference.infer_shapes(program.model).graph
        self._known = {info.name: info.type.tensor_type for info in inferred.value_info}
        self.places = tuple(
            Place(name, node.op_type, node.name, None, name)
            for node in program.model.graph.node
            for name in node.output
            if name in self._known and self._known[name].elem_type in _FLOATS
        )

    def exposed(self, places: Sequence[Place]) -> OnnxGraph:
        model = onnx.ModelProto()
        model.CopyFrom(self._program.model)
        specs = []
        for number, place in enumerate(places):
            found = self._known[place.name]
            model.graph.output.add(name=place.name).type.tensor_type.CopyFrom(found)
            shape = tuple(
                d.dim_value if d.HasField("dim_value") else f"at_{number}_{i}" for i, d in enumerate(found.shape.dim)
            )
            specs.append(TensorSpec(name=place.name, dtype=_FLOATS[found.elem_type], shape=shape))
        signature = self._program.signature
        outputs = (*signature.outputs, *specs)
        structure: dict[str, Any] = {
            "kind": "tuple",
            "items": [{"kind": "tensor", "index": i} for i in range(len(outputs))],
        }
        changed = dataclasses.replace(signature, outputs=outputs, output_structure=structure)
        return dataclasses.replace(self._program, model=model, signature=changed)
