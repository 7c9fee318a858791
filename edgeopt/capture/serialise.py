"""A Program as a folder and back, for the stage cache. Only folders that edgeopt wrote are ever loaded.

`program.json` holds kind, signature, stages and notes; `model.pt2`, `model.pt` or `model.onnx` the graph;
`reference.bin` the tensors of the reference calls; `part_*.pt` and `parts.bin` the scripted parts of a graph.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from edgeopt import digest
from edgeopt.capture import onnx_file, parts_files, script
from edgeopt.errors import StageError
from edgeopt.program import Call, ExportedGraph, OnnxGraph, Program, ScriptGraph, Signature, foreign, graph
from edgeopt.runtime import tensors
from edgeopt.spec.manifest import Axis, TensorRef, TensorSpec

_KINDS = {ExportedGraph: "exported", ScriptGraph: "script", OnnxGraph: "onnx"}


def save(program: Program, folder: Path) -> None:
    """Write the program to `folder`, which is made. Bytes differ between two saves; behaviour does not."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_graph(program, folder)
    head = {
        "kind": _KINDS[type(program)],
        "how": getattr(program, "how", None),
        "integer": getattr(program, "integer", False),
        "half": getattr(program, "half", None),
        "parts": parts_files.save(program.module, folder) if isinstance(program, ExportedGraph) else [],
        "signature": _signature_data(program.signature),
        "reference": _save_reference(program.reference, folder),
        "stages": program.stages,
        "notes": program.notes,
    }
    (folder / "program.json").write_bytes(digest.canonical_json(head))


def load(folder: Path) -> Program:
    """The program that `save` wrote to `folder`; StageError where it cannot be read.

    The caller vouches for the folder's content (the cache checks its digest): reading a graph unpickles.
    """
    try:
        head = json.loads((folder / "program.json").read_bytes())
        common = {
            "signature": _signature(head["signature"]),
            "reference": tuple(_load_call(call, folder) for call in head["reference"]),
            "stages": tuple(head["stages"]),
            "notes": tuple(head["notes"]),
        }
        return _load_graph(head, folder, common)
    except Exception as why:
        raise StageError(
            f"a cached program cannot be read: {type(why).__name__}: {why}", where=str(folder),
            todo="build with --no-cache",
        ) from why  # fmt: skip


def _save_graph(program: Program, folder: Path) -> None:
    if isinstance(program, ExportedGraph):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # export warns of its own internals
            torch.export.save(graph.export(program), folder / "model.pt2")
    elif isinstance(program, ScriptGraph):
        script.write(program.module, folder / "model.pt")
    else:
        onnx_file.write(program.model, folder / "model.onnx")


def _load_graph(head: dict[str, Any], folder: Path, common: dict[str, Any]) -> Program:
    if head["kind"] == "exported":
        if head["integer"]:
            _register_quantized_operators()
        parts_files.load(head["parts"], folder)
        foreign.operator()  # a graph that holds it is read only where it is defined
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.export.load(folder / "model.pt2").module(check_guards=False)
        return ExportedGraph(**common, module=module, integer=head["integer"], half=head["half"])
    if head["kind"] == "script":
        return ScriptGraph(**common, module=script.read_trusted(folder / "model.pt"), how=head["how"])
    return OnnxGraph(**common, model=onnx_file.read(folder / "model.onnx"), integer=head["integer"])


def _register_quantized_operators() -> None:
    """torch's own registration of `quantized_decomposed`: a graph that holds those operators needs it to load."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401


def _signature_data(signature: Signature) -> dict[str, Any]:
    return {
        "inputs": [spec.model_dump(mode="json") for spec in signature.inputs],
        "outputs": [spec.model_dump(mode="json") for spec in signature.outputs],
        "axes": [[name, axis.model_dump(mode="json")] for name, axis in signature.axes.items()],
        # as text, since canonical JSON sorts keys and the order of a dict's outputs is the user's
        "output_structure": json.dumps(signature.output_structure),
        "input_structure": json.dumps(signature.input_structure),
        "values": signature.values,
    }


def _signature(data: dict[str, Any]) -> Signature:
    return Signature(
        inputs=tuple(TensorSpec.model_validate(spec) for spec in data["inputs"]),
        outputs=tuple(TensorSpec.model_validate(spec) for spec in data["outputs"]),
        axes={name: Axis.model_validate(axis) for name, axis in data["axes"]},
        output_structure=json.loads(data["output_structure"]),
        input_structure=json.loads(data["input_structure"]),
        values={name: (low, high) for name, (low, high) in data["values"].items()},
    )


def _save_reference(calls: tuple[Call, ...], folder: Path) -> list[dict[str, list]]:
    with tensors.PackWriter(folder / "reference.bin", "reference.bin") as pack:
        return [
            {
                part: [[name, pack.add(array).model_dump(mode="json")] for name, array in named.items()]
                for part, named in (("inputs", call.inputs), ("outputs", call.outputs))
            }
            for call in calls
        ]


def _load_call(data: dict[str, list], folder: Path) -> Call:
    inputs, outputs = (
        {name: tensors.read(folder, TensorRef.model_validate(ref)) for name, ref in data[part]}
        for part in ("inputs", "outputs")
    )
    return Call(inputs, outputs)
