"""The parts of an exported graph as files beside it: each a TorchScript file, and its example inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edgeopt.capture import script
from edgeopt.program.parts import Input, Output, Part, Size, parts_of, register
from edgeopt.runtime import tensors
from edgeopt.spec.manifest import TensorRef

_EXAMPLES = "parts.bin"


def save(module: torch.fx.GraphModule, folder: Path) -> list[dict[str, Any]]:
    """Write the graph's parts to `folder`; what `load` needs to know of them besides, as JSON data."""
    parts = parts_of(module)
    if not parts:
        return []
    with tensors.PackWriter(folder / _EXAMPLES, _EXAMPLES) as pack:
        return [_save(part, folder, pack) for part in parts]


def load(data: list[dict[str, Any]], folder: Path) -> None:
    """Make the operators of the parts that `save` wrote, which a graph with them needs to load."""
    for each in data:
        examples = tuple(
            tuple(torch.from_numpy(tensors.read(folder, TensorRef.model_validate(ref)).copy()) for ref in refs)
            for refs in each["examples"]
        )
        inputs = tuple(Input(dtype, tuple(shape)) for dtype, shape in each["inputs"])
        outputs = tuple(Output(dtype, tuple(Size(*size) for size in shape)) for dtype, shape in each["outputs"])
        module = script.read_trusted(folder / _file(each["name"]))
        register(Part(each["name"], each["label"], module, inputs, outputs, examples))


def _save(part: Part, folder: Path, pack: tensors.PackWriter) -> dict[str, Any]:
    script.write(part.module, folder / _file(part.name))
    return {
        "name": part.name,
        "label": part.label,
        "inputs": [[i.dtype, list(i.shape)] for i in part.inputs],
        "outputs": [[o.dtype, [[s.input, s.axis, s.times, s.plus] for s in o.shape]] for o in part.outputs],
        "examples": [[pack.add(t.numpy()).model_dump(mode="json") for t in given] for given in part.examples],
    }


def _file(name: str) -> str:
    return f"{name}.pt"
